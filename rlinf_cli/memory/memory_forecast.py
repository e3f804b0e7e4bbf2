"""The forecast of a run's memory, kept in its folder so that reports show it beside what was measured."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlinf_cli.console.outfile import write_whole
from rlinf_cli.console.subcommands import COMMAND, reason
from rlinf_core.errors import RunError
from rlinf_core.foreign.strict_json import load_json_object

NAME: Final = "memory_forecast.json"
# An empty process of each kind is started, one after the other.
_PATIENCE_SECONDS: Final = 300.0


def keep_forecast(folder: Path, record: Mapping[str, Any]) -> None:
    """Write what `rlinf inspect memory RUN --output json` says into the run folder.

    Raises:
        RunError: it cannot be written.
    """
    write_whole(folder / NAME, json.dumps(record, indent=1) + "\n")


def make_forecast(folder: Path) -> str | None:
    """Forecast the memory of a run and keep that, by a process of its own; return why there is none, in one line."""
    command = [*COMMAND, "inspect", "memory", str(folder.absolute()), "--quiet"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"it took longer than {_PATIENCE_SECONDS:.0f} s"
    if (folder / NAME).exists():
        return None
    return reason(done.stderr, done.returncode)


def read_forecast(folder: Path) -> dict[tuple[str, str], int]:
    """Return the forecast bytes of a process by component and phase; empty where none was kept.

    Raises:
        RunError: the file cannot be understood.
    """
    file = folder / NAME
    try:
        components: dict[str, dict[str, Any]] = load_json_object(file.read_bytes())["components"]
        return {
            (component, str(phase["phase"])): int(phase["total"])
            for component, each in components.items()
            for phase in each["phases"]
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError("the forecast of memory cannot be read", where=str(file), why=str(error)) from error
