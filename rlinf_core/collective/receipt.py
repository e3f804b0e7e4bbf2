"""The receiving half of an operation: waits for a parcel, and opens it in the thread that wants the result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from rlinf_core.collective.growth import Growth
from rlinf_core.collective.parcel import Parcel
from rlinf_core.collective.torch_payload import TensorTarget
from rlinf_core.collective.work import Board, Work
from rlinf_core.waiting import OperationKind

T = TypeVar("T")


class Receipt(Work[T], Generic[T]):
    """A receive that was issued. Its parcel is opened once, by the first who asks for the result.

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
        opener: Callable[[Parcel, bool], T],
        board: Board | None = None,
        *,
        detached: bool = False,
        target: TensorTarget | None = None,
    ) -> None:
        """`opener(parcel, filled)` makes the result, see `filled`.

        It must not refer to this handle: in a cycle, a large message would stay until the next garbage collection.
        """
        super().__init__(kind, source, seconds, board, detached=detached)
        self.buffer = target
        self.filled = False
        self._open = opener
        self._opened = False
        self._opening = threading.Lock()

    def arrive(self, parcel: Parcel) -> bool:
        """Return the message is here, or begins to be; tells whether this receipt still wanted it."""
        growth = parcel.growth
        if growth is not None:
            growth.expect(self.seconds, self.since)
            if self.serial is not None and not self._done:
                # Its process goes on meanwhile, and nothing that it asks of this handle may block.
                growth.when_ended(lambda: self._complete(parcel, growth))
                return True
        return self._settle(parcel, None)

    def _complete(self, parcel: Parcel, growth: Growth) -> None:
        settled = self.fail(growth.error) if growth.error is not None else self._settle(parcel, None)
        if growth.error is not None or not settled:
            parcel.release()

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
                    self._value = self._open(cast("Parcel", self._value), self.filled)
                except Exception as error:  # noqa: BLE001 - whatever rebuilding raises is this operation's outcome
                    self._value, self._error = None, error
            self._opened = True
