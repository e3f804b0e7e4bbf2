"""Models of `origins.json` and `placement.json` as a report reads them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rlinf_core.foreign.file_models import FileModel, Rank


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


class PlacementFile(FileModel):
    """The content of `placement.json`."""

    components: dict[str, PlacedComponent] = Field(default_factory=dict[str, PlacedComponent])
