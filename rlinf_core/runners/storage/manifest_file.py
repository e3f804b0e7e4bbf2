"""The validated form of a checkpoint's `manifest.json`."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from rlinf_core.foreign.file_models import Bytes, FileModel, Moment, Name, Rank, Step


def _plain(fact: object) -> object:
    if not isinstance(fact, str | int | float | bool | None):
        raise ValueError("it should be a text, a number, true, false or null")
    return fact


# A union of types would name a branch of it in messages, as in `facts.a.str`.
_Fact = Annotated[Any, AfterValidator(_plain)]


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or str(path) != name:
        raise ValueError("a file of a checkpoint is named relative to its folder")
    return name


class ManifestFile(FileModel):
    """The content of `manifest.json`; the fields are those of `Manifest`."""

    schema_: Annotated[Literal["rlinf.checkpoint/1"], Field(alias="schema")]
    step: Step
    config_hash: Name = ""
    facts: dict[str, _Fact] = Field(default_factory=dict[str, _Fact])
    metrics: dict[str, float | None] = Field(default_factory=dict[str, float | None])
    weight_version: Step = 0
    world_sizes: dict[str, Rank] = Field(default_factory=dict[str, int])
    versions: dict[str, str] = Field(default_factory=dict[str, str])
    time: Moment = 0.0
    snapshot: bool = False
    in_flight: dict[Name, list[Name]] = Field(default_factory=dict[str, list[str]])
    files: dict[Annotated[Name, AfterValidator(_inside)], Bytes] = Field(default_factory=dict[str, int])
    digests: dict[Annotated[Name, AfterValidator(_inside)], Name] = Field(default_factory=dict[str, str])
