"""Work on accelerators that are lock files: a sleep while one is held, as `STAND_IN_WORK` says how long."""

from __future__ import annotations

import fcntl
import json
import os
import time
from functools import cache
from typing import Any

# Nothing of the project is imported with this file: the accelerators register while it imports its own.
VISIBLE = "STAND_VISIBLE_DEVICES"


@cache
def settings() -> Any:
    """Return the work of each part: `fix` seconds and `slope` for each row."""
    return json.loads(os.environ["STAND_IN_WORK"])


@cache
def _lock(device: str) -> int:
    return os.open(f"{os.environ['STAND_IN_LOCKS']}/{device}", os.O_RDWR | os.O_CREAT)


def work(part: str, rows: int) -> None:
    """Hold this process's device and sleep; without one just sleep. A rehearsal has its own stand-ins."""
    from rlinf_core.process import pacing

    if pacing.active is not None:
        return
    line = settings()[part]
    seconds = line["fix"] + line["slope"] * rows
    device = os.environ.get(VISIBLE, "")
    # One that is placed on a machine sees all of its devices, and has none.
    if not device.isdecimal():
        time.sleep(seconds)
        return
    descriptor = _lock(device)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        time.sleep(seconds)
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
