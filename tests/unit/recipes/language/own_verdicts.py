"""Functions that score, in a module that a process of rewards imports at once, and again after a death: no torch."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any


def always_right(text: str) -> float:
    """Call every reply right."""
    return 1.0


def wants_a_form(text: str, answer: str) -> float:
    """Take what stands after the mark of GSM8K."""
    return float(text == f"#### {answer}")


def takes_all(text: str, answer: str) -> float:
    """Fail where the answer is 0."""
    if answer == "0":
        raise ZeroDivisionError("by zero")
    return float(text == answer)


def once_away(text: str, row: dict[str, Any]) -> float:
    """A judge behind a network, away when it is asked for the first time."""
    seen = Path(row["seen"])
    if not seen.exists():
        seen.touch()
        raise ConnectionError("the judge is away")
    return 1.0


def always_away(text: str) -> float:
    raise ConnectionError("the judge is away")


def kills_itself(text: str) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def exits(text: str) -> float:
    """End the process as a script does, which closes its files before it ends."""
    sys.exit(3)
