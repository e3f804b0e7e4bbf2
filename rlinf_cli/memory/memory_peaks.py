"""Memory of this machine, and what the processes of a run held of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlinf_core.errors import RunError
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.process.process_memory import Peak


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
        processes: list[dict[str, Any]] = load_json_object(file.read_bytes())["processes"]
        return {
            (str(each["component"]), int(each["rank"])): {phase: Peak(**peak) for phase, peak in each["phases"].items()}
            for each in processes
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError("the memory of the run cannot be read", where=str(file), why=str(error)) from error
