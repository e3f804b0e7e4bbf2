"""Accelerators that are lock files: work on one is a sleep while it is held, as `STAND_IN_WORK` says how long."""

from __future__ import annotations

import fcntl
import json
import os
import time
from functools import cache
from typing import Any

from rlinf_core.hardware.accelerators import Accelerator, Device, Host

_VISIBLE = "STAND_VISIBLE_DEVICES"


class StandAccelerator(Accelerator):
    """Four devices of no vendor, whose tensors are on the CPU."""

    # A test that claims its devices has its own vendor.
    name = os.environ.get("STAND_IN_VENDOR", "STAND")
    visibility_variable = _VISIBLE
    torch_device = "cpu"
    models = ("stand",)

    def devices(self, host: Host) -> tuple[Device, ...]:
        return tuple(Device(index, "STAND") for index in range(4))


@cache
def settings() -> Any:
    """Return the work of each part: `fix` seconds and `slope` for each row."""
    return json.loads(os.environ["STAND_IN_WORK"])


@cache
def _lock(device: str) -> int:
    return os.open(f"{os.environ['STAND_IN_LOCKS']}/{device}", os.O_RDWR | os.O_CREAT)


def work(part: str, rows: int) -> None:
    """Hold this process's device and sleep; without one just sleep."""
    line = settings()[part]
    seconds = line["fix"] + line["slope"] * rows
    visible = os.environ.get(_VISIBLE, "")
    if not visible:
        time.sleep(seconds)
        return
    descriptor = _lock(visible.split(",")[0])
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        time.sleep(seconds)
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
