"""The receiving half of an operation: waits for a received, and opens it in the thread that wants the result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from rlinf_core.collective.growth import Growth
from rlinf_core.collective.received_message import ReceivedMessage
from rlinf_core.collective.torch_payload import TensorTarget
from rlinf_core.collective.work import WaitTable, Work
from rlinf_core.waiting import OperationKind

T = TypeVar("T")


class PostedReceive(Work[T], Generic[T]):
    """A receive that was issued. Its received is opened once, by the first who asks for the result.

    So a large copy or a slow unpickling never holds up the thread that receives for everybody.

    Attributes:
        buffer: the buffer that `recv_tensor` fills, or None for `recv`.
        filled: whether the connection wrote the body straight into that buffer.
    """

    __slots__ = ("_open", "_opened", "_opening", "buffer", "filled")

    def __init__(
        self,
        kind: OperationKind,
        source: str,
        seconds: float,
        opener: Callable[[ReceivedMessage, bool], T],
        waits: WaitTable | None = None,
        *,
        detached: bool = False,
        target: TensorTarget | None = None,
    ) -> None:
        """`opener(received, filled)` makes the result, see `filled`.

        It must not refer to this handle: in a cycle, a large message would stay until the next garbage collection.
        """
        super().__init__(kind, source, seconds, waits, detached=detached)
        self.buffer = target
        self.filled = False
        self._open = opener
        self._opened = False
        self._opening = threading.Lock()

    def arrive(self, received: ReceivedMessage) -> bool:
        """Return the message is here, or begins to be; tells whether this posted still wanted it."""
        growth = received.growth
        if growth is not None:
            growth.expect(self.seconds, self.since)
            if self.serial is not None and not self._done:
                # Its process goes on meanwhile, and nothing that it asks of this handle may block.
                growth.when_ended(lambda: self._complete(received, growth))
                return True
        return self._settle(received, None)

    def _complete(self, received: ReceivedMessage, growth: Growth) -> None:
        settled = self.fail(growth.error) if growth.error is not None else self._settle(received, None)
        if growth.error is not None or not settled:
            received.release()

    def done(self) -> bool:
        """Return whether it has finished; a message that has arrived is opened for that."""
        if self._done:
            self._open_once()
        return self._done

    def result(self) -> T:
        self._open_once()
        return super().result()

    def exception(self) -> BaseException | None:
        if self._done:
            self._open_once()
        return self._error

    def _open_once(self) -> None:
        if self._opened:
            return
        with self._opening:
            if self._opened:
                return
            if self._error is None:
                try:
                    self._value = self._open(cast("ReceivedMessage", self._value), self.filled)
                except Exception as error:  # noqa: BLE001 - whatever rebuilding raises is this operation's outcome
                    self._value, self._error = None, error
            self._opened = True
