"""Peak memory of a process, by phase."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from rlinf_core.process.proc import fields

# Calls of a phase that are measured: the first ones, and then every that many.
_FIRST, _EVERY = 8, 16


class Peak(NamedTuple):
    """The most memory that a process held in a phase, in bytes.

    Attributes:
        rss: the memory of the host, shared memory that it has mapped included.
        device: the memory of its accelerator, as torch counts it; 0 without one.
    """

    rss: int
    device: int = 0


class PeakMeter:
    """Measures the peak of each phase of this process; `peaks` are the largest so far."""

    def __init__(self) -> None:
        self.peaks: dict[str, Peak] = {}
        self._calls: dict[str, int] = {}

    @contextmanager
    def during(self, phase: str) -> Generator[None, None, None]:
        """Measure a block; of phases that come often only some are."""
        count = self._calls[phase] = self._calls.get(phase, 0) + 1
        if count > _FIRST and count % _EVERY:
            yield
            return
        _forget_peak()
        try:
            yield
        finally:
            before, now = self.peaks.get(phase, Peak(0)), _peak()
            self.peaks[phase] = Peak(max(before.rss, now.rss), max(before.device, now.device))


def rss_fields() -> dict[str, int]:
    """Return `VmRSS` and its peak `VmHWM` in bytes; empty where the system does not report them."""
    status = fields("/proc/self/status")
    return {name: int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM") if name in status}


def _forget_peak() -> None:
    # 5 resets the peak of the resident set (proc(5)).
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    cuda = _cuda()
    if cuda is not None:
        cuda.reset_peak_memory_stats()


def _peak() -> Peak:
    cuda = _cuda()
    return Peak(rss_fields().get("VmHWM", 0), 0 if cuda is None else int(cuda.max_memory_allocated()))


def _cuda() -> Any:
    """Return torch's accelerator module if this process uses one."""
    torch: Any = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
