"""Limits of an endpoint: authentication, sizes, concurrency, and time for a request to arrive."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from recipes.agent.endpoint.fields import RequestError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LARGEST_BODY: Final = 16 << 20
LARGEST_HEAD: Final = 64 << 10
# More than one agent needs; requests beyond it are rejected temporarily, or closed.
MOST_REQUESTS: Final = 128
MOST_CONNECTIONS: Final = 512
HEAD_SECONDS: Final = 10.0
BODY_SECONDS: Final = 30.0

T = TypeVar("T")


class Gate:
    """Looks at the head of each request before anything else of it is read.

    Args:
        app: answers requests that may pass.
        token: of the run.
        refusal: returns the answer to a request that may not.
    """

    def __init__(self, app: ASGIApp, token: str, refusal: Callable[[Request, RequestError], ASGIApp]) -> None:
        self._app = app
        self._token = token.encode()
        self._refusal = refusal
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        # Clients differ in whether the base URL includes the version.
        path: str = scope["path"]
        while path.startswith("/v1/"):
            path = path.removeprefix("/v1")
        scope = {**scope, "path": f"/v1{path}", "raw_path": f"/v1{path}".encode()}
        request = Request(scope)
        try:
            self._check(request)
        except RequestError as error:
            await self._refusal(request, error)(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1

    def _check(self, request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        presented = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not hmac.compare_digest(presented.encode("latin-1", "replace"), self._token):
            raise RequestError(HTTPStatus.UNAUTHORIZED, "the token does not belong to this task")
        if int(request.headers.get("content-length", "0")) > LARGEST_BODY:
            raise too_large()
        if self._running >= MOST_REQUESTS:
            message = f"{MOST_REQUESTS} requests are in progress: try again"
            raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, message, {"Retry-After": "1"})


def too_large() -> RequestError:
    """Return the error of a body beyond the limit."""
    return RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body may have at most {LARGEST_BODY} bytes")


async def read_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        RequestError: it is too large, or does not arrive in time.
        ClientDisconnect: the client has gone.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > LARGEST_BODY:
                    raise too_large()
    except TimeoutError:
        message = f"the body did not arrive within {BODY_SECONDS:g} s"
        raise RequestError(HTTPStatus.REQUEST_TIMEOUT, message, {"Connection": "close"}) from None
    return bytes(body)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of a task, which is cancelled if the client disconnects.

    Raises:
        ClientDisconnect: it has gone.
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


class TimedConnection(H11Protocol):
    """A connection that is closed when there are too many, or when its request arrives too slowly."""

    _began = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or close at once."""
        super().connection_made(transport)
        self._began = self.loop.time()
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        if self.timeout_keep_alive_task is not None:
            self._began = self.loop.time()
        super().data_received(data)

    def _watch(self) -> None:
        if self.transport.is_closing():
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)
        waits = cycle is None or cycle.response_complete
        # Between two requests, the server's own limit holds.
        if waits and self.timeout_keep_alive_task is None and self.loop.time() - self._began >= HEAD_SECONDS:
            self.transport.abort()
            return
        self.loop.call_later(HEAD_SECONDS / 4, self._watch)
