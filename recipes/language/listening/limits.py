"""Limits of a server: sizes, time for a request to arrive, and connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any, Final, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from recipes.language.listening.request_error import RequestError, bad_request
from rlinf_core.foreign.budget import Budget, OverBudgetError, json_size
from rlinf_core.foreign.strict_json import BadJsonError, load_json_object

LARGEST_BODY: Final = 16 << 20
# Of what a body becomes once it is decoded.
LARGEST_DECODED: Final = 8 * LARGEST_BODY
LARGEST_HEAD: Final = 64 << 10
# More than one agent needs; connections beyond it are closed.
MOST_CONNECTIONS: Final = 512
HEAD_SECONDS: Final = 10.0
BODY_SECONDS: Final = 30.0

T = TypeVar("T")


def check_length(request: Request) -> None:
    """Check the length that a request announces, before its body is read.

    Raises:
        RequestError: it is too large.
    """
    if int(request.headers.get("content-length", "0")) > LARGEST_BODY:
        raise too_large()


def too_large(most: int = LARGEST_BODY) -> RequestError:
    """Return the error of a body beyond the limit."""
    return RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body may have at most {most} bytes")


async def read_body(request: Request, most: int = LARGEST_BODY) -> bytes:
    """Return the body of a request, of at most `most` bytes.

    Raises:
        RequestError: it is too large, or does not arrive in time.
        ClientDisconnect: the client has gone.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large(most)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_SECONDS:g} s"
        raise RequestError(HTTPStatus.REQUEST_TIMEOUT, message, {"Connection": "close"}) from None
    return bytes(body)


async def json_body(request: Request, most: int = LARGEST_BODY) -> dict[str, Any]:
    """Return the JSON object that is the body of a request, of at most `most` bytes, decoded in a thread.

    Raises:
        RequestError: it is not a JSON object, is too large, or does not arrive in time.
        ClientDisconnect: the client has gone.
    """
    body = await read_body(request, most)
    try:
        Budget(8 * most, "a body").take(json_size(body))
        return await asyncio.to_thread(load_json_object, body)
    except (BadJsonError, OverBudgetError) as error:
        raise bad_request(f"the body {error}") from None


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
    """A connection that is closed when there are too many, or when its request or answer travels too slowly."""

    _began = 0.0
    # Since when the client has not taken all that was sent.
    _sending: float | None = None

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
        if not self.transport.get_write_buffer_size():
            self._sending = None
        elif self._sending is None:
            self._sending = self.loop.time()
        elif self.loop.time() - self._sending >= BODY_SECONDS:
            self.transport.abort()
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)
        waits = cycle is None or cycle.response_complete
        # Between two requests, the server's own limit holds.
        if waits and self.timeout_keep_alive_task is None and self.loop.time() - self._began >= HEAD_SECONDS:
            self.transport.abort()
            return
        self.loop.call_later(HEAD_SECONDS / 4, self._watch)
