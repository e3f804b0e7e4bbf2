"""The documents of a run: `origins.json`, `placement.json`, and the provenance in `environment.json`."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field

from rlinf_core.errors import RunError
from rlinf_core.foreign.files import FileModel, Rank, read_model
from rlinf_core.runners.storage import durable
from rlinf_core.version import __version__

PLACEMENT: Final = "placement.json"
ORIGINS: Final = "origins.json"


class OriginOfValue(FileModel):
    """A value of the configuration with its source."""

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
    """Neighboring units of the picture with the same processes."""

    units: list[str]
    users: list[DrawnUser]
    about: str


class DrawnRow(FileModel):
    """A row of units of the picture."""

    columns: Rank
    runs: list[DrawnRun]


class DrawnCard(FileModel):
    """A node of the picture, or several equal nodes."""

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
    """The picture of a placement, made by `picture_record`."""

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
        """The first of the process's accelerators; None without accelerators."""
        return next(iter(self.local_accelerator_ranks), None)


def recorded_places(file: Path) -> dict[str, list[RecordedPlace]]:
    """Return the places of a run's processes by component; empty if the file does not exist.

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


SCHEMA: Final = "rlinf.environment/1"
ENVIRONMENT: Final = "environment.json"

_DIST_INFO: Final = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)\.dist-info")
# Bytes that are hashed at each end of a large file, in addition to its size: a weights file must not take minutes.
_END_BYTES: Final = 1 << 20
# Seconds that git may take, because a repository may be on a slow disk.
_GIT_SECONDS: Final = 10.0


class Provenance(NamedTuple):
    """Versions, code, input files and machine of a run.

    Attributes:
        versions: the versions of Python, rlinf, and every package in the driver's interpreter.
        code: digests of the source of rlinf and of the recipe's package; in a git repository also the `commit`, and a
        digest of `uncommitted` changes (empty if there are none).
        inputs: digests of the files and folders that the configuration names, by path.
        machine: host, platform, number of processors.
    """

    versions: Mapping[str, str] = {}
    code: Mapping[str, str] = {}
    inputs: Mapping[str, str] = {}
    machine: Mapping[str, str] = {}


class _Environment(FileModel):
    schema_: Annotated[Literal["rlinf.environment/1"], Field(alias="schema")]
    versions: dict[str, str]
    code: dict[str, str]
    inputs: dict[str, str]
    machine: dict[str, str]


def collect(packages: Iterable[str] = ("rlinf_core", "recipes"), inputs: Iterable[Path] = ()) -> Provenance:
    """Return the provenance of a run that this process is starting.

    Args:
        packages: import names whose source counts as the run's code.
        inputs: files and folders that the run reads; missing ones are skipped.
    """
    return Provenance(
        versions={"python": platform.python_version(), "rlinf": __version__, **_installed()},
        code={**{name: _source_digest(name) for name in packages}, **_git(Path.cwd())},
        inputs={str(path): digest for path in inputs if (digest := _content_digest(path))},
        machine={
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "processors": str(os.cpu_count() or 0),
        },
    )


def write_provenance(folder: Path, provenance: Provenance) -> None:
    """Write the provenance of the run in `folder`.

    Raises:
        OSError: the file cannot be written.
    """
    durable.write_whole(folder / ENVIRONMENT, json.dumps({"schema": SCHEMA, **provenance._asdict()}, indent=2) + "\n")


def read_provenance(folder: Path) -> Provenance | None:
    """Return the provenance of the run in `folder`; None for a run of an older rlinf.

    Raises:
        RunError: the file cannot be read.
    """
    path = folder / ENVIRONMENT
    try:
        content = read_model(path, _Environment)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError("the provenance of a run cannot be read", where=str(path), why=error.strerror) from None
    return Provenance(content.versions, content.code, content.inputs, content.machine)


def _installed() -> dict[str, str]:
    """Return the versions of installed packages from their folder names, which is much faster than from metadata."""
    versions: dict[str, str] = {}
    for place in sys.path:
        try:
            names = os.listdir(place or ".")
        except OSError:
            continue
        for name in names:
            parts = _DIST_INFO.fullmatch(name)
            if parts is not None:
                versions.setdefault(parts["name"].lower().replace("_", "-"), parts["version"])
    return dict(sorted(versions.items()))


def _source_digest(package: str) -> str:
    """Return a digest of the Python files of a package; empty if it has none."""
    spec = find_spec(package)
    digest, empty = sha256(), True
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(path for path in Path(place).rglob("*.py") if path.is_file()):
            digest.update(f"{file.relative_to(place)}\n".encode())
            digest.update(file.read_bytes())
            empty = False
    return "" if empty else digest.hexdigest()[:16]


def _content_digest(path: Path) -> str:
    """Return a digest of a file, or of all files in a folder; empty if neither exists."""
    try:
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        if not files:
            return ""
        digest = sha256()
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.relative_to(path)} {size}\n".encode())
            with file.open("rb") as content:
                digest.update(content.read(_END_BYTES))
                if size > _END_BYTES:
                    content.seek(max(_END_BYTES, size - _END_BYTES))
                    digest.update(content.read(_END_BYTES))
        return digest.hexdigest()[:16]
    except OSError:
        return ""


def _git(folder: Path) -> dict[str, str]:
    """Return the commit of the git repository around `folder`, and a digest of uncommitted changes."""
    commit = _answer(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}
    changes = _answer(folder, "diff", "--no-ext-diff", "HEAD") or ""
    return {"commit": commit.strip(), "uncommitted": sha256(changes.encode()).hexdigest()[:16] if changes else ""}


def _answer(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
