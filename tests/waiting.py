"""Waiting in tests, for a condition and no longer."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], what: str = "it", seconds: float = 20.0, pause: float = 0.01) -> None:
    """Return as soon as `condition` holds.

    Args:
        what: is named where it does not.
        seconds: so long at most; a limit for a test that would hang, and no measure of anything.
        pause: between two looks.

    Raises:
        AssertionError: it does not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {seconds:g} s"
        time.sleep(pause)
