"""The base of a job's HTTP servers: serving on loopback, and limits of sizes, of time to arrive, and of connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import uvicorn
from starlette.requests import ClientDisconnect, Request
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from rlinf_core.foreign.budget import Budget, OverBudgetError, json_size
from rlinf_core.foreign.strangers import Unproven
from rlinf_core.foreign.strict_json import BadJsonError, load_json_object

if TYPE_CHECKING:
    from starlette.types import ASGIApp


class RequestError(Exception):
    """An error that refuses a request.

    Attributes:
        status: the status of the response.
        headers: the headers of the response.
    """

    def __init__(self, status: HTTPStatus, message: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers)


def bad_request(message: str) -> RequestError:
    """Return the error for an invalid request."""
    return RequestError(HTTPStatus.BAD_REQUEST, message)


LARGEST_BODY: Final = 16 << 20
# The budget of a decoded body, in bytes.
LARGEST_DECODED: Final = 8 * LARGEST_BODY
_LARGEST_HEAD: Final = 64 << 10
# The connections of one owner, or of all unproven clients: more than an agent needs.
MOST_CONNECTIONS: Final = 512
# Key of the connection in the state of a request.
_CONNECTION: Final = "connection"
HEAD_SECONDS: Final = 10.0
BODY_SECONDS: Final = 30.0

T = TypeVar("T")
# Larger bodies are decoded in a thread, not in the event loop.
_AT_ONCE: Final = 64 << 10
_DECODERS: Final = ThreadPoolExecutor(2, "rlinf-decoder")


def check_length(request: Request) -> None:
    """Check the length that a request announces, before its body is read.

    Raises:
        RequestError: the body is too large.
    """
    if int(request.headers.get("content-length", "0")) > LARGEST_BODY:
        raise _too_large(LARGEST_BODY)


def _too_large(most: int) -> RequestError:
    """Return the error for a body beyond the limit."""
    return RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body may have at most {most} bytes")


async def read_body(request: Request, most: int | None = None) -> bytes:
    """Return the body of a request, at most `most` bytes, by default `LARGEST_BODY`.

    Raises:
        RequestError: the body is too large, or does not arrive in time.
        ClientDisconnect: the client has gone.
    """
    body, most = bytearray(), most or LARGEST_BODY
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_SECONDS:g} s"
        raise RequestError(HTTPStatus.REQUEST_TIMEOUT, message, {"Connection": "close"}) from None
    return bytes(body)


async def json_body(request: Request, most: int | None = None) -> dict[str, Any]:
    """Return the JSON object that is the body of a request, decoded in a thread; see `read_body`.

    Raises:
        RequestError: the body is not a JSON object, is too large, or does not arrive in time.
        ClientDisconnect: the client has gone.
    """
    body = await read_body(request, most)
    try:
        Budget(LARGEST_DECODED, "a body").take(json_size(body))
        return await in_thread(load_json_object, body) if len(body) > _AT_ONCE else load_json_object(body)
    except (BadJsonError, OverBudgetError) as error:
        raise bad_request(f"the body {error}") from None


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a function that decodes or encodes megabytes, without blocking the event loop.

    The threads are separate, as all those of `asyncio.to_thread` may be waiting for the result.
    """
    return await asyncio.get_running_loop().run_in_executor(_DECODERS, work, *arguments)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of a task, which is cancelled if the client disconnects.

    Raises:
        ClientDisconnect: the client has gone.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for pending in (task, leaving):
            pending.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


def prove(request: Request, owner: str) -> None:
    """Record the owner of a request's connection; unproven connections are closed first to make room."""
    connection = request.scope.get("state", {}).get(_CONNECTION)
    if connection is not None:
        connection.prove(owner)


class TimedConnection(H11Protocol):
    """A connection that is closed if there are too many, or if its request or response is too slow.

    If there are too many, the oldest connection of the largest party is closed: an owner, or all unproven clients.

    Args:
        config: the configuration of the server.
        state: the state that the server's connections share.
        owned: all connections, by owner.
    """

    _began = 0.0
    # Since when sent bytes have been waiting for the client.
    _sending: float | None = None
    _owner = ""

    def __init__(self, config: Config, state: ServerState, owned: Unproven[TimedConnection]) -> None:
        super().__init__(config, state, {_CONNECTION: self})
        self._owned = owned

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `H11Protocol`: admit the connection, and start watching it."""
        super().connection_made(transport)
        self._began = self.loop.time()
        self._admit()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `H11Protocol`: forget the connection."""
        self._owned.remove(self)
        super().connection_lost(exc)

    def prove(self, owner: str) -> None:
        """Record the owner of the connection, proved by a request."""
        if owner != self._owner and self._owned.remove(self):
            self._owner = owner
            self._admit()

    def _admit(self) -> None:
        for other in self._owned.admit(self, self._owner):
            other.transport.abort()

    def data_received(self, data: bytes) -> None:
        """See `H11Protocol`: restart the time limit when a new request begins."""
        if self.timeout_keep_alive_task is not None:
            self._began = self.loop.time()
        super().data_received(data)

    def _watch(self) -> None:
        if self.transport.is_closing():
            return
        if not self.transport.get_write_buffer_size():
            self._sending = None
        elif self._sending is None:
            self._sending = self.loop.time()
        elif self.loop.time() - self._sending >= BODY_SECONDS:
            self.transport.abort()
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)
        waits = cycle is None or cycle.response_complete
        # Between two requests, uvicorn's idle limit applies.
        if waits and self.timeout_keep_alive_task is None and self.loop.time() - self._began >= HEAD_SECONDS:
            self.transport.abort()
            return
        self.loop.call_later(HEAD_SECONDS / 4, self._watch)


_IDLE_SECONDS: Final = 60


@asynccontextmanager
async def listening(app: ASGIApp, port: int = 0) -> AsyncGenerator[int]:
    """Serve `app` on loopback within the context, whose value is the port.

    Args:
        app: the application.
        port: the port to listen on; 0: any free port.

    Raises:
        OSError: the port is in use.
    """
    # Do not use `uvicorn.Server`, which installs signal handlers and polls about ten times a second.
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=_IDLE_SECONDS,
        h11_max_incomplete_event_size=_LARGEST_HEAD,
    )
    config.load()
    state = ServerState()
    most = MOST_CONNECTIONS
    owned = Unproven[TimedConnection](2 * most, from_one=most)
    # Let asyncio create the socket: it disables Nagle's algorithm only on its own connections.
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: TimedConnection(config, state, owned), "127.0.0.1", port, backlog=most)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        tasks = list(state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(state.connections):
            connection.transport.abort()
