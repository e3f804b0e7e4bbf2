"""The server of the page, in its own thread; it sends no data to a client that has not presented the token.

The page itself holds no secret. Only this page can open a WebSocket (`Origin`), and another site cannot reach this
server under its own name (`Host`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from recipes.embodied.interventions.operator_desk import (
    MAX_MESSAGE,
    BadMessageError,
    DeskTakenError,
    Exhibit,
    OperatorDesk,
    age_of,
    controls_of,
    decode,
    jpeg,
    knows,
    packed,
    shown,
)
from rlinf_core.foreign.strangers import LimitedWarnings, Unproven, origin_of

_PAGE: Final = Path(__file__).parent / "page"
_ASSETS: Final = {
    "/": ("operator.html", "text/html"),
    "/operator.js": ("operator.js", "text/javascript"),
    "/operator.css": ("operator.css", "text/css"),
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
_ANY: Final = ("0.0.0.0", "::")
# The most sets of images in transit: a slow link shows fewer images, not older ones.
_MOST_ON_THE_WAY: Final = 2
_STATE_SECONDS: Final = 0.5  # between two states if nothing changes
_START_SECONDS: Final = 30.0
_END_SECONDS: Final = 5.0
WRONG_TOKEN, REPLACED, TAKEN, BAD_MESSAGE = 4401, 4408, 4409, 4400  # codes of closed connections
_REPLACED: Final = "somebody else with the token has taken over"
_log = logging.getLogger("rlinf.interventions")


class PageServer:
    """Serves the page, and hears its operator.

    Args:
        host: address to listen on.
        port: TCP port; 0: any that is free.
        token: what a person must send first.
        desk: the place of the operator.
        hz: steps per second.
        quality: the quality of JPEG pictures.

    Attributes:
        exhibit: the content for the operator.
        round_trips: the latest delays from the sending of an image to its display, in seconds.

    Raises:
        OSError: the server cannot listen there.
    """

    def __init__(self, host: str, port: int, token: str, desk: OperatorDesk, *, hz: float, quality: int) -> None:
        self._host, self._token, self._desk, self._hz, self._quality = host, token, desk, hz, quality
        self.exhibit = Exhibit(self._wake)
        self.round_trips: deque[float] = deque(maxlen=1000)
        self._loop = asyncio.new_event_loop()
        self._changed, self._ending = asyncio.Event(), asyncio.Event()
        self._entrance = Entrance()
        self._replaced: set[asyncio.Future[None]] = set()  # operators who are being notified
        self._warn = LimitedWarnings(_log.warning)
        started: Future[int] = Future()
        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._serve(host, port, started)),
            name="rlinf-operator-page",
            daemon=True,
        )
        self._thread.start()
        self.port = started.result(_START_SECONDS)

    def close(self) -> None:
        """End the server. Idempotent."""
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(_END_SECONDS)
        self._warn.close()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _serve(self, host: str, port: int, started: Future[int]) -> None:
        config = uvicorn.Config(
            _Gate(self._application(), host),
            lifespan="off",
            log_config=None,
            access_log=False,
            ws_max_size=MAX_MESSAGE,
            ws_per_message_deflate=False,
            ws_ping_interval=5.0,
            ws_ping_timeout=10.0,
        )
        config.load()
        state = ServerState()
        make = partial(Newcomer, self._entrance, config, state, {})
        try:
            server = await asyncio.get_running_loop().create_server(make, host, port)
        except OSError as error:
            started.set_exception(error)
            return
        started.set_result(server.sockets[0].getsockname()[1])
        while not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), 1.0)
            self._entrance.sweep(asyncio.get_running_loop().time())
        server.close()
        self._entrance.close()
        tasks = list(state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(state.connections):
            transport = cast("asyncio.Transport | None", connection.transport)
            if transport is not None:
                transport.abort()

    def _application(self) -> ASGIApp:
        pages = [Route(path, _asset(name, media_type)) for path, (name, media_type) in _ASSETS.items()]
        return Starlette(routes=[*pages, WebSocketRoute("/operate", self._operate)])

    async def _operate(self, socket: WebSocket) -> None:
        """Serve a person from the token until they leave or are replaced."""
        await socket.accept()
        if not await self._proves(socket):
            return
        client = socket.client
        self._entrance.prove(None if client is None else (client.host, client.port))
        try:
            replaced = self._desk.sit(socket, time.monotonic())
        except DeskTakenError:
            await _refuse(socket, TAKEN, "somebody else is steering; try again when they have left")
            return
        if replaced is not None:
            replaced = cast("WebSocket", replaced)
            self._replaced.add(farewell := asyncio.ensure_future(_refuse(replaced, REPLACED, _REPLACED)))
            farewell.add_done_callback(self._replaced.discard)
        try:
            await socket.send_json({"ok": True, "hz": self._hz})
            await self._converse(socket)
        except (WebSocketDisconnect, RuntimeError, OSError):
            pass  # they have left
        except asyncio.CancelledError:
            if not self._ending.is_set():
                raise
        finally:
            self._desk.leave(socket)

    async def _proves(self, socket: WebSocket) -> bool:
        origin = origin_of(None if socket.client is None else tuple(socket.client))
        try:
            async with asyncio.timeout(TOKEN_SECONDS):
                fault = "" if knows(decode(await _text(socket)), self._token) else "a wrong token"
        except BadMessageError as error:
            fault = str(error)
        except TimeoutError:
            fault = "no token"
        except WebSocketDisconnect:
            return False
        if fault:
            self._warn(f"a page at {origin} sent {fault}; closed")
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
                await socket.close(WRONG_TOKEN)
        return not fault

    async def _converse(self, socket: WebSocket) -> None:
        """Receive an operator's messages and send images, until either ends."""
        sent: dict[int, float] = {}
        work = [asyncio.ensure_future(self._hear(socket, sent)), asyncio.ensure_future(self._show(socket, sent))]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                if task.done():
                    task.result()
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _hear(self, socket: WebSocket, sent: dict[int, float]) -> None:
        while True:
            try:
                message = decode(await _text(socket))
                number = shown(message)
                if number is None:
                    if not self._desk.hear(socket, controls_of(message), time.monotonic()):
                        return
                elif (began := sent.pop(number, None)) is not None:
                    self.round_trips.append(time.monotonic() - began)
                    self._changed.set()
            except BadMessageError as error:
                self._warn(f"the page of the operator sent {error}; closed")
                await _refuse(socket, BAD_MESSAGE, str(error))
                return

    async def _show(self, socket: WebSocket, sent: dict[int, float]) -> None:
        number, state, sent_at = 0, None, 0.0
        while True:
            self._changed.clear()  # changes from here on end the wait below
            newest = self.exhibit.newest
            now = time.monotonic()
            if newest.state != state or now - sent_at >= _STATE_SECONDS:
                delay = self.round_trips[-1] if self.round_trips else None
                await socket.send_json({"state": newest.state, "delay": delay})
                state, sent_at = newest.state, now
            if newest.number != number and len(sent) < _MOST_ON_THE_WAY:
                number = newest.number
                sent[number] = time.monotonic()
                for view in newest.views:
                    picture = await asyncio.to_thread(jpeg, view.image, self._quality)
                    await socket.send_bytes(packed(view.camera, number, age_of(view), picture))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _STATE_SECONDS)


class _Gate:
    """Refuses requests under other host names or from other sites, and adds security headers."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
        known = len(hosts) == 1 and self._names(hosts[0])
        if scope["type"] == "websocket":
            if not known or origins != [f"http://{hosts[0]}"]:
                await receive()
                await send({"type": "websocket.close", "code": 1008})  # answered by 403
                return
            await self._app(scope, receive, send)
            return
        refusal = PlainTextResponse("open the address that the run has logged\n", 403)

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        await (self._app if known else refusal)(scope, receive, protected)

    def _names(self, host: str) -> bool:
        """Return whether a value of the header `Host` names this server; a tunnel has its own port."""
        if self._host in _ANY:
            return True
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return name in (*_LOOPBACK, self._host)


async def _text(socket: WebSocket) -> bytes:
    """Return the next message.

    Raises:
        BadMessageError: it is not text.
        WebSocketDisconnect: the connection has ended.
    """
    message: Mapping[str, Any] = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1000))
    text: object = message.get("text")
    if not isinstance(text, str):
        raise BadMessageError("bytes instead of text")
    return text.encode("utf-8", "replace")


async def _refuse(socket: WebSocket, code: int, message: str) -> None:
    with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError, TimeoutError):
        async with asyncio.timeout(1.0):  # the link may be dead
            await socket.send_json({"ok": False, "message": message})
            await socket.close(code)


def _asset(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = (_PAGE / name).read_text(encoding="utf-8")

    async def answer(_: Request) -> Response:
        return Response(content, media_type=media_type)

    return answer


_MOST_UNPROVEN: Final = 32
TOKEN_SECONDS: Final = 10.0  # within which a connection must present the token, or is closed


class Entrance:
    """The connections of a server that have not yet presented the token. Used by one thread."""

    def __init__(self) -> None:
        self._unproven: Unproven[asyncio.Transport] = Unproven(_MOST_UNPROVEN, seconds=TOKEN_SECONDS)

    def admit(self, transport: asyncio.Transport, now: float) -> None:
        """Admit a connection, and close the oldest one when there are too many."""
        for leaving in self._unproven.admit(transport, origin_of(transport.get_extra_info("peername")), now):
            leaving.abort()

    def prove(self, client: tuple[str, int] | None) -> None:
        """Keep the connection of a client that has presented the token."""
        for transport in self._unproven.waiting():
            peer: Any = transport.get_extra_info("peername")
            if peer is not None and client is not None and tuple(peer[:2]) == tuple(client):
                self._unproven.remove(transport)

    def sweep(self, now: float) -> None:
        """Close the connections that have not presented the token in time."""
        for transport in self._unproven.remove_overdue(now):
            transport.abort()

    def close(self) -> None:
        """Close all of these connections."""
        for transport in self._unproven.remove_all():
            transport.abort()


class Newcomer(H11Protocol):
    """A connection that counts as unproven from its start."""

    def __init__(self, entrance: Entrance, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._entrance = entrance

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection with the entrance."""
        super().connection_made(transport)
        self._entrance.admit(transport, self.loop.time())
