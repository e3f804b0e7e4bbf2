"""The places of a run's processes, from its `placement.json`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rlinf_cli.report.documents import PlacedProcess, PlacementFile
from rlinf_core.errors import RunError
from rlinf_core.foreign.file_models import read_model


class RecordedPlace(NamedTuple):
    """The place of a process: its node, and the first of its accelerators there, None without one."""

    cluster_node_rank: int
    local_accelerator_rank: int | None


def recorded_places(file: Path) -> dict[str, list[RecordedPlace]]:
    """Return the places of a run's processes by component; none where the run has written none.

    Raises:
        RunError: the file is malformed.
    """
    try:
        placement = read_model(file, PlacementFile)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunError(f"`{file}` {error.strerror}") from error
    return {name: [_place(process) for process in placed.processes] for name, placed in placement.components.items()}


def _place(process: PlacedProcess) -> RecordedPlace:
    from rlinf_core.hardware.accelerators.registry import accelerator_names

    units = process.local_hardware_ranks if process.hardware_type in accelerator_names() else []
    return RecordedPlace(process.node_rank, next(iter(units), None))
