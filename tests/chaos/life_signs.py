"""Signs of life of a run."""

from __future__ import annotations

from typing import Final

# A run that only says that it waits says so for as many deadlines at most.
_DEADLINES_OF_WORDS: Final = 4.0


class LifeSigns:
    """The signs of life of a run: what it writes, and what its command prints.

    A launch on a busy machine writes nothing for minutes, but says what it waits for.

    Args:
        deadline: the seconds without any sign after which the run is hung.
        now: the time in monotonic seconds.
    """

    def __init__(self, deadline: float, now: float) -> None:
        self._deadline = deadline
        self._written, self._printed = 0, 0
        self._moved = self._spoke = now

    def note(self, written: int, printed: int, now: float) -> None:
        """Note the sizes of what it has written and printed so far."""
        if written != self._written:
            self._written, self._moved = written, now
        if printed != self._printed:
            self._printed, self._spoke = printed, now

    def disturbed(self, now: float) -> None:
        """Note that it was just hit, and may take its time again."""
        self._moved = now

    def are_gone(self, now: float) -> bool:
        """Return whether the run is hung."""
        silent, still = now - max(self._moved, self._spoke), now - self._moved
        return silent > self._deadline or still > _DEADLINES_OF_WORDS * self._deadline
