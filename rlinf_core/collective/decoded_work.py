"""Work handles whose results are decoded by the caller."""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Any, Generic, TypeVar

from rlinf_core.collective.work import WaitTable, Work
from rlinf_core.waiting import OperationKind

T = TypeVar("T")


class DecodedWork(Work[T], Generic[T]):
    """An operation whose result is decoded once, by the first thread that asks for it.

    So a large copy or slow unpickling never blocks the receiving thread. A subclass implements `_decode`, and whether
    there is anything to decode: by default there is.
    """

    __slots__ = ("_opened", "_opening")

    def __init__(
        self,
        kind: OperationKind,
        target: str,
        seconds: float,
        waits: WaitTable | None = None,
        *,
        key: str | None = None,
        detached: bool = False,
        encoded: bool = True,
    ) -> None:
        super().__init__(kind, target, seconds, waits, key=key, detached=detached)
        self._opened = not encoded
        self._opening = threading.Lock() if encoded else None

    def done(self) -> bool:
        """Return whether it has finished; a result that has arrived is decoded for that."""
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
        if self._opened or self._opening is None:
            return
        with self._opening:
            if self._opened:
                return
            if self._error is None:
                try:
                    self._value = self._decode(self._value)
                except Exception as error:  # noqa: BLE001 - whatever rebuilding raises is this operation's outcome
                    self._value, self._error = None, error
            else:
                self._drop_encoded()
            self._opened = True

    @abstractmethod
    def _decode(self, value: Any) -> object:
        """Return the result, from what arrived."""

    def _drop_encoded(self) -> None:
        """Drop what had arrived of a result, since the operation has failed."""
