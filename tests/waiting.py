"""Waiting in tests, for a condition and no longer, and for calls in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


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


def in_thread(function: Callable[..., object], *args: object, **options: object) -> tuple[threading.Thread, list[Any]]:
    """Return a started thread, and the list with the result, or the error, of a call there."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function(*args, **options))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome
