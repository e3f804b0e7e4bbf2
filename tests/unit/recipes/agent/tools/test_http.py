"""The tool `http` against a server on loopback."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from recipes.agent.tools.http import Http, HttpRequest, page_text, parse_request
from recipes.agent.tools.tool import CallLost, ToolError, ToolUnavailable
from recipes.agent.tools.toolbox import Toolbox


class Answers(BaseHTTPRequestHandler):
    """Answers by path; `/hang` says nothing until the client has gone."""

    gone = threading.Event()

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        if self.path == "/hang":
            self.rfile.read(1)
            self.gone.set()
        elif self.path == "/away":
            self._say(503, "back soon")
        elif self.path == "/breaks":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf")
        elif self.path == "/slow":
            self.rfile.read(1)
        elif self.path.startswith("/to/"):
            target = {"/to/page": "/page", "/to/other": f"http://127.0.0.2:{port}/page", "/to/me": "/to/me"}[self.path]
            self._say(302, "", Location=target)
        elif self.path == "/image":
            self._say(200, "\x89", kind="image/png")
        elif self.path == "/zip":
            self._say(200, "x", **{"Content-Encoding": "gzip"})
        elif self.path == "/html":
            self._say(200, "<title>T</title><script>x()</script><p>one  <b>two</b></p>", kind="text/html")
        elif self.path == "/latin":
            self._say(200, "gr\xfcn", kind="text/plain; charset=latin-1", code="latin-1")
        elif self.path == "/long":
            self._say(200, "a" * 100_000)
        elif self.path == "/page":
            self._say(200, f"{self.command} {self.headers['Host']}")
        else:
            self._say(404, "no such page")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path == "/again":
            self._say(307, "", Location="/echo")
        elif self.path == "/then":
            self._say(303, "", Location="/page")
        else:
            self._say(200, f"{self.headers['Content-Type']} {body}")

    def _say(self, status: int, text: str, kind: str = "text/plain", code: str = "utf-8", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(text.encode(code))), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode(code))

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("0.0.0.0", 0), Answers) as server:  # reached at 127.0.0.2, too
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def asked(port: int, text: str, *, allow: tuple[str, ...] = (), max_bytes: int = 1000) -> str:
    tool = Http(allow or (f"http://127.0.0.1:{port}",), 30.0, max_bytes)
    return asyncio.run(tool.call(text.format(f"http://127.0.0.1:{port}")))


def test_get_and_post(port: int) -> None:
    assert asked(port, "GET {}/page") == asked(port, "{}/page") == f"GET 127.0.0.1:{port}"
    assert asked(port, 'POST {}/echo\n{{"a": "\xe4"}}') == 'application/json {"a": "\xe4"}'
    assert asked(port, "POST {}/echo\ntwo\nlines") == "text/plain two\nlines"


def test_texts_are_read_as_they_are_meant(port: int) -> None:
    assert asked(port, "{}/html") == "T\none\ntwo"
    assert asked(port, "{}/latin") == "grün"
    assert asked(port, "{}/long", max_bytes=50) == "a" * 50


def test_redirects_keep_to_the_list(port: int) -> None:
    assert asked(port, "{}/to/page") == f"GET 127.0.0.1:{port}"
    assert asked(port, "POST {}/again\nx") == "text/plain x"
    assert asked(port, "POST {}/then\nx") == f"GET 127.0.0.1:{port}"
    with pytest.raises(ToolError, match=rf"http://127.0.0.2:{port} is not an allowed server"):
        asked(port, "{}/to/other")
    assert asked(port, "{}/to/other", allow=(f"127.0.0.0/8:{port}", f"127.0.0.1:{port}", f"127.0.0.2:{port}"))
    with pytest.raises(ToolError, match="more than 5 redirects"):
        asked(port, "{}/to/me")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}/nothing", "404 Not Found: no such page"),
        ("{}/image", "image/png, not text"),
        ("{}/zip", "compressed"),
        ("DELETE {}/page", "write GET and a URL"),
        ("", "write GET and a URL"),
        ("GET example.org", "begins with http"),
        ("GET http://example.org/", "not an allowed server"),
        ("GET http://127.0.0.1:1/", "not an allowed server"),
    ],
)
def test_errors_are_told(port: int, text: str, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        asked(port, text)


def test_a_name_that_leads_to_a_private_address_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def leads(host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", leads)
    with pytest.raises(ToolError, match="private address that is not listed"):
        asked(port, f"http://example.org:{port}/page", allow=(f"example.org:{port}",))
    allow = (f"example.org:{port}", "127.0.0.0/8")
    assert asked(port, f"http://example.org:{port}/page", allow=allow) == f"GET example.org:{port}"


def test_a_server_that_is_down_is_no_fault_of_the_model() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        with pytest.raises(ToolUnavailable, match="does not answer") as caught:
            asked(taken.getsockname()[1], "{}/page")
        assert not isinstance(caught.value, CallLost)


def test_the_name_is_looked_up_once_and_the_address_kept(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[str] = []

    def leads(host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
        # A name that leads to a listed address when it is checked, and to another one when it is used.
        asked_for.append(host)
        address = "127.0.0.1" if asked_for.count("example.org") == 1 else "127.0.0.2"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address if host == "example.org" else host, port))]

    monkeypatch.setattr(socket, "getaddrinfo", leads)
    text = asked(port, f"http://example.org:{port}/page", allow=(f"example.org:{port}", "127.0.0.1"))
    assert text == f"GET example.org:{port}"
    assert asked_for.count("example.org") == 1


def test_the_next_address_is_tried_where_one_does_not_answer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def leads(host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
        addresses = ["::1", "127.0.0.1"] if host == "example.org" else [host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", leads)
    allow = (f"example.org:{port}", "127.0.0.0/8", "::1")
    assert asked(port, f"http://example.org:{port}/page", allow=allow) == f"GET example.org:{port}"


def test_a_call_that_takes_too_long_leaves_no_connection(port: int) -> None:
    Answers.gone.clear()
    tools = Toolbox([Http((f"127.0.0.1:{port}",), 30.0, 1000)], 0.2)
    seen = asyncio.run(tools.call("http", f"http://127.0.0.1:{port}/hang"))
    assert (seen.failure, seen.text) == ("timeout", "error: no answer within 0.2 s")
    assert Answers.gone.wait(30)


@pytest.mark.parametrize("path", ["away", "breaks", "slow"])
def test_what_breaks_a_server_is_no_server_that_is_down(port: int, path: str) -> None:
    tool = Http((f"http://127.0.0.1:{port}",), 0.2, 1000)
    with pytest.raises(CallLost):
        asyncio.run(tool.call(f"http://127.0.0.1:{port}/{path}"))


def test_a_name_server_that_is_away_is_no_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*words: Any, **how: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", away)
    with pytest.raises(ToolUnavailable, match="cannot resolve the host"):
        asyncio.run(Http(("http://somewhere.example",), 1.0, 1000).call("http://somewhere.example/"))


def test_requests_as_models_write_them() -> None:
    assert parse_request(" GET https://a.org/ ") == HttpRequest("GET", "https://a.org/", None)
    assert parse_request("POST https://a.org/\n\nx\n") == HttpRequest("POST", "https://a.org/", b"x")


def test_pages_are_shown_without_what_nobody_sees() -> None:
    assert page_text("<style>p{}</style><p>a &amp; b<script>x</script></p></script>c") == "a & b\nc"
