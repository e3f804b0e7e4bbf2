"""New weights on their way to an engine that never stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from recipes.language.weights import WeightUpdate

T = TypeVar("T", covariant=True)


class Arriving(Protocol[T]):
    """Something that is on its way to this process."""

    def done(self) -> bool: ...
    def wait(self) -> T: ...


class ArrivingWeights:
    """Updates that were announced: each is received while tokens are drawn, and loaded when it is there.

    Args:
        receive: begins to receive weights.
        load: loads them, between two tokens.
    """

    def __init__(self, receive: Callable[[], Arriving[WeightUpdate]], load: Callable[[WeightUpdate], None]) -> None:
        self._receive = receive
        self._load = load
        self._announced = 0
        self._receiving: Arriving[WeightUpdate] | None = None

    def __bool__(self) -> bool:
        """Return whether any are to come."""
        return bool(self._announced or self._receiving)

    def announce(self) -> None:
        """Expect another update."""
        self._announced += 1

    def advance(self, *, wait: bool) -> None:
        """Receive, and load what is there.

        Args:
            wait: for the next update, where one is on its way: there is nothing to draw meanwhile.
        """
        if self._announced and self._receiving is None:
            self._announced -= 1
            self._receiving = self._receive()
        if self._receiving is not None and (wait or self._receiving.done()):
            self._load(self._receiving.wait())
            self._receiving = None
