"""A tool that asks listed hosts by HTTP."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Final, NamedTuple
from urllib.parse import urljoin

from recipes.agent.config.allow_list import AllowList, UrlParts, parse_url
from recipes.agent.tools.tool import Tool, ToolError, in_thread

_MOST_REDIRECTS: Final = 5
_KEEPS_METHOD: Final = (307, 308)
_REDIRECTS: Final = (301, 302, 303, *_KEEPS_METHOD)
_FIRST_ERROR: Final = 400
# Types of contents that are texts, besides `text/...`.
_TEXTS: Final = ("json", "xml", "javascript", "x-www-form-urlencoded", "yaml", "x-ndjson")
_UNSEEN: Final = ("script", "style", "template", "noscript")


class HttpRequest(NamedTuple):
    """A request as a model writes it."""

    method: str
    url: str
    body: bytes | None


class Http(Tool):
    """Pages of listed hosts: GET and POST, as texts.

    Args:
        allow: the hosts, as in `agent.http.allow`.
        seconds: for one connection, and one read of it; time for the whole call is the caller's to limit.
        max_bytes: of an answer; what comes after them is not read.
    """

    name = "http"

    def __init__(self, allow: Sequence[str], seconds: float, max_bytes: int) -> None:
        self.description = (
            "asks a server: GET and an URL, or POST and an URL with the body on the lines below; servers: "
            + ", ".join(allow)
        )
        self._allow = AllowList(allow)
        self._seconds = seconds
        self._max_bytes = max_bytes

    async def call(self, argument: str) -> str:
        """See `Tool`. Cancelled, it leaves no connection."""
        exchange = _Exchange(self._allow, self._seconds, self._max_bytes)
        try:
            return await in_thread(exchange.run, argument)
        finally:
            exchange.abort()


def parse_request(text: str) -> HttpRequest:
    """Return the request that a model wrote; an URL alone is a GET.

    Raises:
        ToolError: it is none.
    """
    line, _, body = text.strip().partition("\n")
    words = line.split()
    method, url = ("GET", *words) if len(words) == 1 else words if len(words) == 2 else ("", "")
    if method not in ("GET", "POST"):
        raise ToolError("write GET and an URL, or POST and an URL with the body on the lines below")
    return HttpRequest(method, url, body.strip("\n").encode() if method == "POST" else None)


class _Exchange:
    """A request with its redirects; `run` in a thread, `abort` from another one."""

    def __init__(self, allow: AllowList, seconds: float, max_bytes: int) -> None:
        self._allow = allow
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._socket: socket.socket | None = None
        self._over = False

    def abort(self) -> None:
        """End it; `run` raises at once where it is waiting for the server."""
        self._over = True
        if self._socket is not None:
            _shut(self._socket)

    def run(self, text: str) -> str:
        """Return what the server answers.

        Raises:
            ToolError: it cannot be asked, or answers with an error, or with what is no text.
        """
        request = parse_request(text)
        for _ in range(_MOST_REDIRECTS + 1):
            try:
                answer = self._answer(request)
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                raise ToolError(f"{type(error).__name__}: {error}") from None
            if isinstance(answer, str):
                return answer
            request = answer
        raise ToolError(f"more than {_MOST_REDIRECTS} redirects")

    def _answer(self, request: HttpRequest) -> str | HttpRequest:
        """Return the text of an answer, or the request that it redirects to."""
        try:
            url = parse_url(request.url)
        except ValueError as error:
            raise ToolError(str(error)) from None
        if not self._allow.allows(url):
            raise ToolError(f"{url.scheme}://{url.host}:{url.port} is not among the servers that may be asked")
        connection = http.client.HTTPConnection(url.host, url.port)
        try:
            connection.sock = self._connected(url)
            connection.request(request.method, url.path, request.body, _headers(request, url))
            response = connection.getresponse()
            target = response.headers.get("Location")
            if response.status in _REDIRECTS and target:
                return _redirected(request, response.status, urljoin(request.url, target))
            return self._text(response)
        finally:
            connection.close()

    def _connected(self, url: UrlParts) -> socket.socket:
        """Return a connection to a host, at an address that may be reached."""
        found = [each[4][0] for each in socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)]
        reachable = [str(each) for each in found if self._allow.reachable(str(each))]
        if not reachable:
            raise ToolError(f"{url.host} is at {found[0]}, a private address that is not listed")
        self._socket = sock = self._opened(reachable, url.port)
        if url.scheme == "https":
            try:
                self._socket = sock = ssl.create_default_context().wrap_socket(sock, server_hostname=url.host)
            except BaseException:
                sock.close()
                raise
        if self._over:
            _shut(sock)
        return sock

    def _opened(self, addresses: Sequence[str], port: int) -> socket.socket:
        """Return a connection to the first of some addresses that takes one.

        It is opened to an address that was checked, and not to the name, which may lead elsewhere a moment later.
        """
        for each in addresses[:-1]:
            try:
                return socket.create_connection((each, port), self._seconds)
            except OSError:
                continue
        return socket.create_connection((addresses[-1], port), self._seconds)

    def _text(self, response: http.client.HTTPResponse) -> str:
        kind = response.headers.get_content_type()
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ToolError("the answer is compressed, which was not asked for")
        if not (kind.startswith("text/") or any(each in kind for each in _TEXTS)):
            raise ToolError(f"the answer is {kind}, and no text")
        body = response.read(self._max_bytes)
        try:
            text = body.decode(response.headers.get_content_charset("utf-8"), "replace")
        except LookupError:
            text = body.decode("utf-8", "replace")
        if kind == "text/html":
            text = page_text(text)
        if response.status >= _FIRST_ERROR:
            raise ToolError(f"{response.status} {response.reason}: {text}".strip(": \n"))
        return text


def _headers(request: HttpRequest, url: UrlParts) -> dict[str, str]:
    host = f"[{url.host}]" if ":" in url.host else url.host
    headers = {
        "Host": f"{host}:{url.port}",
        "Accept-Encoding": "identity",
        "User-Agent": "rlinf",
        "Connection": "close",
    }
    if request.body is not None:
        headers["Content-Type"] = "application/json" if request.body[:1] in (b"{", b"[") else "text/plain"
    return headers


def _redirected(request: HttpRequest, status: int, url: str) -> HttpRequest:
    """Return the request that a redirect asks for."""
    return request._replace(url=url) if status in _KEEPS_METHOD else HttpRequest("GET", url, None)


def _shut(sock: socket.socket) -> None:
    """Wake whoever reads from a connection; that of TLS is not told, which would wait."""
    with contextlib.suppress(OSError):  # it is closed already
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _PageText(HTMLParser):
    """Collects what a reader sees of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._unseen = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._unseen += tag in _UNSEEN

    def handle_endtag(self, tag: str) -> None:
        self._unseen -= tag in _UNSEEN and self._unseen > 0

    def handle_data(self, data: str) -> None:
        if not self._unseen and data.strip():
            self.texts.append(" ".join(data.split()))


def page_text(html: str) -> str:
    """Return the text of a page without its tags, a line for each piece."""
    parser = _PageText()
    parser.feed(html)
    parser.close()
    return "\n".join(parser.texts)
