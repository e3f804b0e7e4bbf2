"""The server of live pages: loopback, a token in the address, and the folders of runs as its only source."""

from __future__ import annotations

import gzip
import json
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlinf_cli.report.page import TEMPLATES, Drawings, compile_templates
from rlinf_cli.report.script import chart_script
from rlinf_cli.report.serving.followed_run import FollowedRun, refresh_all
from rlinf_cli.report.serving.pages import LivePage, overview_page, overview_version, run_page
from rlinf_core.foreign.files import open_below

HOST: Final = "127.0.0.1"
# Seconds of a request that are spent on reading metrics: the page of a long run opens before they are all read.
_READING_SECONDS: Final = 0.2
# When a page is opened, the first chart comes before more is read.
_OPENING_SECONDS: Final = 0.05
# Below this many bytes compressing is not worth it.
_LEAST_COMPRESSED: Final = 1 << 12
_COMPRESSION: Final = 5
_MOST_CONNECTIONS: Final = 64
_MOST_VIDEO_BYTES: Final = 256 << 20
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Gate:
    """Refuses requests to another host or without the token, and adds the headers of protection."""

    def __init__(self, app: ASGIApp, token: str, hosts: Sequence[str]) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = [host.encode() for host in hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        token = scope["path"].split("/")[1].encode("utf-8", "replace")
        # Another name of this address would be that of a page elsewhere.
        known = len(hosts) == 1 and hosts[0] in self._hosts and secrets.compare_digest(token, self._token)
        refusal = PlainTextResponse(
            "open the whole address that `rlinf report --live` has printed\n", HTTPStatus.FORBIDDEN
        )

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        await (self._app if known else refusal)(scope, receive, protected)


class LivePages:
    """The pages of runs by address: one run at the root, or all of them there and each below `runs/N/`."""

    def __init__(self, runs: Sequence[FollowedRun]) -> None:
        self._runs = runs
        # Requests come in several threads.
        self._lock = threading.Lock()
        self._specs: dict[str, Drawings] = {}

    def routes(self) -> list[Route]:
        """Return the routes, relative to the token's folder."""
        routes = [
            Route("/", self._root),
            Route("/charts", self._charts),
            Route("/charts.js", _script),
            Route("/page.js", _asset("page.js", "text/javascript")),
            Route("/page.css", _asset("page.css", "text/css")),
        ]
        prefix = "/runs/{run:int}" if len(self._runs) > 1 else ""
        if prefix:
            routes += [Route(f"{prefix}/", self._one), Route(f"{prefix}/charts", self._charts)]
        return [*routes, Route(f"{prefix}/videos/{{number:int}}", self._video)]

    def _root(self, request: Request) -> Response:
        if len(self._runs) == 1:
            return self._one(request)
        with self._lock:
            refresh_all(self._runs, _seconds_of(request))
            if request.query_params.get("since") == overview_version(self._runs):
                return Response(status_code=HTTPStatus.NO_CONTENT)
            return self._answer(request, overview_page(self._runs, root="", sketched=_opened(request)))

    def _one(self, request: Request) -> Response:
        several = len(self._runs) > 1
        run = self._run(request)
        if run is None:
            return _missing()
        with self._lock:
            run.refresh(_seconds_of(request))
            if request.query_params.get("since") == str(run.version):
                return Response(status_code=HTTPStatus.NO_CONTENT)
            up = "../../" if several else ""
            return self._answer(request, run_page(run, overview=up, root=up, sketched=_opened(request)))

    def _answer(self, request: Request, page: LivePage) -> Response:
        self._specs[_place(request)] = page.specs
        return _compressed(request, page.text.encode(), "text/html", "no-store")

    def _charts(self, request: Request) -> Response:
        names = request.query_params.get("names", "").split(",")
        with self._lock:
            specs = self._specs.get(_place(request), {})
            # A chart of an earlier version of the page may be gone.
            drawn = {name: specs[name]() for name in names if name in specs}
        return _compressed(request, json.dumps(drawn).encode(), "application/json", "no-store")

    def _video(self, request: Request) -> Response:
        run = self._run(request)
        number: int = request.path_params["number"]
        if run is None:
            return _missing()
        with self._lock:
            videos = run.content().videos
        if number >= len(videos):
            return _missing()
        name = videos[number].relative_to(run.folder.path).as_posix()
        try:
            with os.fdopen(open_below(run.folder.path, name, os.O_RDONLY), "rb") as file:
                content = file.read(_MOST_VIDEO_BYTES + 1)
        except OSError:
            return _missing()
        return _missing() if len(content) > _MOST_VIDEO_BYTES else Response(content, media_type="video/mp4")

    def _run(self, request: Request) -> FollowedRun | None:
        number: int = request.path_params.get("run", 0)
        return self._runs[number] if number < len(self._runs) else None


def application(runs: Sequence[FollowedRun], token: str, hosts: Sequence[str]) -> ASGIApp:
    """Return the server's application.

    Args:
        token: the first part of every path.
        hosts: values of the header Host that are taken.
    """
    return Gate(Starlette(routes=[Mount(f"/{token}", routes=LivePages(runs).routes())]), token, hosts)


def listening(port: int) -> socket.socket:
    """Return a socket that listens on loopback.

    Args:
        port: 0 for any free one.

    Raises:
        OSError: the port is taken.
    """
    return socket.create_server((HOST, port), backlog=_MOST_CONNECTIONS)


def serve(runs: Sequence[FollowedRun], listener: socket.socket, token: str) -> None:
    """Serve the pages until the process is asked to end."""
    threading.Thread(target=_prepare, daemon=True).start()
    port = listener.getsockname()[1]
    app = application(runs, token, [f"{HOST}:{port}", f"localhost:{port}"])
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _prepare() -> None:
    """Compile the pages and pack their script, while the address is being opened."""
    compile_templates()
    _packed(chart_script().encode())


def _opened(request: Request) -> bool:
    """Return whether a page is opened, and not renewed."""
    return "since" not in request.query_params


def _seconds_of(request: Request) -> float:
    """Return how long a request for a page may read metrics."""
    return _OPENING_SECONDS if _opened(request) else _READING_SECONDS


def _place(request: Request) -> str:
    return str(request.path_params.get("run", ""))


def _missing() -> Response:
    return PlainTextResponse("there is no such page\n", HTTPStatus.NOT_FOUND)


def _compressed(request: Request, content: bytes, media_type: str, cached: str) -> Response:
    """Return an answer, compressed where the browser can read that: pages are also looked at through a tunnel."""
    headers = {"Cache-Control": cached, "Vary": "Accept-Encoding"}
    if len(content) >= _LEAST_COMPRESSED and "gzip" in request.headers.get("accept-encoding", ""):
        content = _packed(content)
        headers["Content-Encoding"] = "gzip"
    return Response(content, media_type=media_type, headers=headers)


# The script of the charts is by far the largest answer, and the same every time.
@lru_cache(maxsize=4)
def _packed(content: bytes) -> bytes:
    return gzip.compress(content, _COMPRESSION)


def _script(request: Request) -> Response:
    return _compressed(request, chart_script().encode(), "text/javascript", "private, max-age=3600")


def _asset(name: str, media_type: str) -> Any:
    def answer(_: Request) -> Response:
        return Response((TEMPLATES / name).read_text(encoding="utf-8"), media_type=media_type)

    return answer
