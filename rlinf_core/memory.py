"""Memory of processes: what one held at most in each of its phases, and forecasts of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlinf_core.errors import RunError

# Calls of a phase that are measured: the first ones, and then every so many.
_FIRST, _EVERY = 8, 16
_STATUS: Final = "/proc/self/status"


class Peak(NamedTuple):
    """The most memory that a process held in a phase, in bytes.

    Attributes:
        rss: of the host, shared memory that it has mapped included.
        device: of its accelerator, as torch counts it; 0 without one.
    """

    rss: int
    device: int = 0


class PhaseForecast(NamedTuple):
    """Memory that a process is expected to hold at most in a phase, the method that runs.

    Attributes:
        parts: bytes by what they hold: `base` (interpreter and libraries), `weights`, `gradients`, ...
        on_device: the parts that lie in the accelerator's memory, where the process has one.
    """

    phase: str
    parts: Mapping[str, int]
    on_device: frozenset[str] = frozenset()

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


class ProcessForecast(NamedTuple):
    """Memory of the processes of a component, each of which holds the same.

    Attributes:
        processes: how many there are.
        phases: in the order in which they come.
        shared: bytes of shared memory (/dev/shm) that its messages take at most, over all processes.
        notes: what is not known.
    """

    component: str
    processes: int
    phases: tuple[PhaseForecast, ...]
    shared: int = 0
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes of the largest phase."""
        return max(each.total for each in self.phases)


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


def machine_memory() -> int | None:
    """Return the bytes of memory of this machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def read_peaks(file: Path) -> dict[tuple[str, int], dict[str, Peak]]:
    """Return the peaks in `memory.json` of a run, by component and rank; empty where the run has none.

    Raises:
        RunError: the file cannot be understood.
    """
    try:
        processes: list[dict[str, Any]] = json.loads(file.read_text())["processes"]
        return {
            (str(each["component"]), int(each["rank"])): {phase: Peak(**peak) for phase, peak in each["phases"].items()}
            for each in processes
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError("the memory of the run cannot be read", where=str(file), why=str(error)) from error


def rss_fields() -> dict[str, int]:
    """Return `VmRSS` and `VmHWM`, the peak of it, in bytes; empty where the system does not tell."""
    found: dict[str, int] = {}
    with suppress(OSError), open(_STATUS) as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                found[name] = int(value.split()[0]) * 1024
    return found


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
    """Return torch's module of accelerators, where this process uses one."""
    torch: Any = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
