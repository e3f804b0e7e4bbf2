"""Promises in seconds, on a machine that may be busy with more than the test."""

from __future__ import annotations

import os
from pathlib import Path


def within(seconds: float) -> float:
    """What a free machine promises in `seconds` takes this long on one where several processes want each core."""
    running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    return seconds * max(1.0, max(os.getloadavg()[0], running) / (os.cpu_count() or 1))
