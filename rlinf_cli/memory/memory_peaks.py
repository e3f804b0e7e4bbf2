"""This machine's memory, and the measured peaks of a run's processes."""

from __future__ import annotations

import os
from pathlib import Path

from rlinf_core.errors import RunError
from rlinf_core.foreign.file_models import Bytes, FileModel, Rank, read_model
from rlinf_core.process.process_memory import Peak


class _Peak(FileModel):
    rss: Bytes
    device: Bytes = 0


class _Process(FileModel):
    component: str
    rank: Rank
    phases: dict[str, _Peak]


class _Peaks(FileModel):
    processes: list[_Process]


def machine_memory() -> int | None:
    """Return this machine's memory in bytes; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def read_peaks(file: Path) -> dict[tuple[str, int], dict[str, Peak]]:
    """Return the peaks in `memory.json` of a run, by component and rank; empty if there are none.

    Raises:
        RunError: the file is malformed.
    """
    try:
        processes = read_model(file, _Peaks).processes
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunError("the memory of the run cannot be read", where=str(file), why=error.strerror) from error
    return {
        (process.component, process.rank): {
            phase: Peak(peak.rss, peak.device) for phase, peak in process.phases.items()
        }
        for process in processes
    }
