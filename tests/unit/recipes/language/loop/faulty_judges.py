"""Functions that score and fail; their own process imports them again each time that it has died: no torch here."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


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
