"""`origins.json` and `placement.json` of a run, as reports and others read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import Field

from rlinf_core.errors import RunError
from rlinf_core.foreign.files import FileModel, Rank, read_model

PLACEMENT: Final = "placement.json"
ORIGINS: Final = "origins.json"


class OriginOfValue(FileModel):
    """A value of the configuration, and where it came from."""

    path: str
    origin: str
    value: Any = None
    file: str | None = None
    line: Rank | None = None


class OriginsFile(FileModel):
    """The content of `origins.json`."""

    values: list[OriginOfValue] = Field(default_factory=list[OriginOfValue])


class PlacedProcess(FileModel):
    """A process of the placement, with its environment."""

    rank: Rank
    node_rank: Rank
    node_group: str
    hardware_type: str | None = None
    local_hardware_ranks: list[Rank] = Field(default_factory=list[Rank])
    python: str | None = None
    env: dict[str, str] = Field(default_factory=dict[str, str])
    env_layers: dict[str, str] = Field(default_factory=dict[str, str])


class PlacedComponent(FileModel):
    """The processes of a component."""

    processes: list[PlacedProcess] = Field(default_factory=list[PlacedProcess])


class DrawnUser(FileModel):
    """Processes of a component on a unit of the picture."""

    component: str
    ranks: str
    color: Rank


class DrawnRun(FileModel):
    """Neighbouring units of the picture with the same processes."""

    units: list[str]
    users: list[DrawnUser]
    about: str


class DrawnRow(FileModel):
    """A row of units of the picture."""

    columns: Rank
    runs: list[DrawnRun]


class DrawnCard(FileModel):
    """A node of the picture, or several alike."""

    title: str
    about: str
    many: bool
    rows: list[DrawnRow]
    loose: list[DrawnUser]


class DrawnSection(FileModel):
    """The nodes of a group in the picture."""

    title: str
    subtitle: str
    cards: list[DrawnCard]


class DrawnComponent(FileModel):
    """A component of the picture, with its number of processes."""

    name: str
    size: Rank


class DrawnPlacement(FileModel):
    """The picture of a placement, as `picture_record` makes it."""

    title: str
    subtitle: str
    components: list[DrawnComponent]
    idle: bool
    sections: list[DrawnSection]


class PlacementFile(FileModel):
    """The content of `placement.json`."""

    components: dict[str, PlacedComponent] = Field(default_factory=dict[str, PlacedComponent])
    picture: DrawnPlacement | None = None


class RecordedPlace(NamedTuple):
    """The place of a process: its node, and its accelerators there."""

    cluster_node_rank: int
    local_accelerator_ranks: tuple[int, ...] = ()

    @property
    def local_accelerator_rank(self) -> int | None:
        """The first of its accelerators; None without one."""
        return next(iter(self.local_accelerator_ranks), None)


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
    from rlinf_core.hardware.accelerators import accelerator_names

    units = process.local_hardware_ranks if process.hardware_type in accelerator_names() else []
    return RecordedPlace(process.node_rank, tuple(units))
