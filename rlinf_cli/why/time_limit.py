"""The time limit of the scheduler that started this process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

REACHED: Final = "reaches its time limit"
# Schedulers warn by a signal that long before they kill; `sbatch --signal` asks for more.
_BEFORE: Final = 600.0


def limit_reached(environ: Mapping[str, str], now: float) -> str | None:
    """Return, in words, that a Slurm job reaches its time limit about `now` (seconds since 1970); else None."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    if not end.isascii() or not end.isdigit() or not -_BEFORE < now - float(end) < _BEFORE:
        return None
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(end)))
    return f"Slurm job {environ.get('SLURM_JOB_ID', '')} {REACHED} at {at}"
