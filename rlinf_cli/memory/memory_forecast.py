"""The memory forecast of a run, saved in its folder so that reports show it beside the measured peaks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from rlinf_cli.console.subcommands import COMMAND, reason
from rlinf_core.errors import RunError
from rlinf_core.foreign.file_models import FileModel, read_model
from rlinf_core.runners.storage import durable

NAME: Final = "memory_forecast.json"
# An empty process of each kind is started, one after another.
_PATIENCE_SECONDS: Final = 300.0


class _Phase(FileModel):
    phase: str
    total: Annotated[float, Field(ge=0, lt=2**63)]


class _Component(FileModel):
    phases: list[_Phase]


class _Forecast(FileModel):
    components: dict[str, _Component]


def keep_forecast(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the result of `rlinf inspect memory RUN --output json` into the run folder.

    Raises:
        RunError: it cannot be written.
    """
    try:
        durable.write_whole(folder / NAME, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise RunError("the memory forecast cannot be written", where=str(folder), why=error.strerror) from error


def make_forecast(folder: Path) -> str | None:
    """Forecast and save the memory of a run in a child process; return the reason for a failure, in one line."""
    command = [*COMMAND, "inspect", "memory", str(folder.absolute()), "--quiet"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"it took longer than {_PATIENCE_SECONDS:.0f} s"
    if (folder / NAME).exists():
        return None
    return reason(done.stderr, done.returncode)


def read_forecast(folder: Path) -> dict[tuple[str, str], int]:
    """Return the forecast bytes of a process by component and phase; empty if there is none.

    Raises:
        RunError: the file cannot be understood.
    """
    file = folder / NAME
    try:
        components = read_model(file, _Forecast).components
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunError("the memory forecast cannot be read", where=str(file), why=error.strerror) from error
    return {
        (component, phase.phase): int(phase.total)
        for component, component_forecast in components.items()
        for phase in component_forecast.phases
    }
