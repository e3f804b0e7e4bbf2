"""A checkpoint of a run: its manifest, and the verification of its files."""

from __future__ import annotations

import logging
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import file_digest, sha256
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, cast

from pydantic import AfterValidator, Field

from rlinf_core.errors import CheckpointError
from rlinf_core.foreign.files import Bytes, FileModel, Moment, Name, Rank, Step, open_regular, read_fault, read_model
from rlinf_core.version import __version__

if TYPE_CHECKING:
    from rlinf_core.job.recipe import Fact

SCHEMA: Final = "rlinf.checkpoint/1"
MANIFEST: Final = "manifest.json"
# The most bytes of a checkpoint that commands read for a quick check, which takes a second or two.
GLANCE: Final = 1 << 30

_LOGGER: Final = logging.getLogger("rlinf")
FOLDER_NAME: Final = re.compile(r"global_step_(\d+)")
_ANOTHER: Final = "name another `global_step_N` folder, or the run for its newest complete one"


def _plain(fact: object) -> object:
    if not isinstance(fact, str | int | float | bool | None):
        raise ValueError("it should be a text, a number, true, false or null")
    return fact


# With a union of types, messages would name one of its branches, such as `facts.a.str`.
_Fact = Annotated[Any, AfterValidator(_plain)]


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or str(path) != name:
        raise ValueError("a file of a checkpoint is named relative to its folder")
    return name


_Schema = Annotated[Literal["rlinf.checkpoint/1"], Field(alias="schema")]


class Manifest(FileModel):
    """The description of a checkpoint, stored in it as `manifest.json`.

    Attributes:
        step: the training step after which it was written.
        config_hash: the hash of the run's configuration.
        facts: the values that a resuming run must share, by the path of the key, such as `actor.model.hidden_dim`.
        metrics: the newest value of every metric.
        weight_version: the number of weight updates.
        world_sizes: the number of processes of each component; a resuming run may have others.
        versions: the versions of rlinf, python and torch.
        time: the time when it was written, in seconds since 1970.
        files: the size in bytes of every file, by its path within the checkpoint. `CheckpointStore.commit` sets it.
        digests: the SHA-256 of every file in hexadecimal digits, by the same paths; empty if an earlier rlinf wrote the
            checkpoint without digests. `CheckpointStore.commit` sets it.
        snapshot: whether the next checkpoint replaces it.
        in_flight: the items that were buffered or in flight, see `ItemFates`.
    """

    schema_: _Schema = SCHEMA
    step: Step
    config_hash: Name = ""
    facts: dict[str, _Fact] = Field(default_factory=dict[str, _Fact])
    metrics: dict[str, float | None] = Field(default_factory=dict[str, float | None])
    weight_version: Step = 0
    world_sizes: dict[str, Rank] = Field(default_factory=dict[str, int])
    versions: dict[str, str] = Field(default_factory=dict[str, str])
    time: Moment = 0.0
    files: dict[Annotated[Name, AfterValidator(_inside)], Bytes] = Field(default_factory=dict[str, int])
    digests: dict[Annotated[Name, AfterValidator(_inside)], Name] = Field(default_factory=dict[str, str])
    snapshot: bool = False
    in_flight: dict[Name, list[Name]] = Field(default_factory=dict[str, list[str]])


class ManifestFile(Manifest):
    """The content of `manifest.json`, which must name its schema."""

    schema_: _Schema  # pyright: ignore[reportGeneralTypeIssues] - required in a file


class Checkpoint(NamedTuple):
    """A complete checkpoint: the folder with the state after training step `step`."""

    step: int
    path: Path
    manifest: Manifest

    def __repr__(self) -> str:
        return f"<checkpoint of step {self.step}: {self.path}>"

    def check(self, facts: Mapping[str, Fact]) -> None:
        """Check that a run can resume from this checkpoint.

        `facts` are the facts of the run, like `Manifest.facts`. Facts missing in the checkpoint are not compared.

        Raises:
            CheckpointError: facts differ; the error names every difference.
        """
        missing = object()
        differences = [
            f"`{name}` is {_shown(old)} there and {_shown(facts.get(name))} now"
            for name, old in self.manifest.facts.items()
            if facts.get(name, missing) != old
        ]
        if differences:
            raise CheckpointError(
                f"this run cannot resume from step {self.step}",
                where=str(self.path),
                why="; ".join(differences),
                help="set these keys to the checkpoint's values, or start from scratch without `runner.resume_dir`",
            )

    def verify(self) -> None:
        """Read and verify every file; see `verify_files`.

        Raises:
            CheckpointError: a file is damaged; the error names the first damaged file.
        """
        if not self.manifest.digests:
            _LOGGER.warning("%s has no digests: it is from an earlier rlinf, and only sizes are verified", self.path)
        verify_files(self.path, self.manifest)


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the complete checkpoint in a folder `global_step_N`.

    Raises:
        CheckpointError: there is no checkpoint, or it is not complete.
    """
    manifest = load_manifest(path)
    damage = _damage(path, manifest.files)
    if damage:
        raise CheckpointError("the checkpoint is not complete", where=str(path), why=damage, help=_ANOTHER)
    return Checkpoint(manifest.step, path, manifest)


def sound_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder `global_step_N`, after reading and verifying all of its files.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    return checkpoint


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is named like a checkpoint, damaged or not."""
    return FOLDER_NAME.fullmatch(path.name) is not None


def verify_files(path: Path, manifest: Manifest | None = None, within: Sequence[str] = ("",)) -> None:
    """Read the files of a checkpoint, and compare them with the digests in its manifest.

    Args:
        path: the folder `global_step_N`.
        manifest: the manifest of the checkpoint; by default it is loaded.
        within: path prefixes of the files to verify; by default all.

    Raises:
        CheckpointError: a file is missing or damaged. If the manifest has no digests, only sizes are compared.
    """
    manifest = load_manifest(path) if manifest is None else manifest
    begin = tuple(within)
    files = {name: size for name, size in manifest.files.items() if name.startswith(begin)}
    damage = _damage(path, files) or changed_file(path, files, manifest.digests)
    if damage is not None:
        raise CheckpointError("the checkpoint is damaged", where=str(path), why=damage, help=_ANOTHER)


def first_sound(folders: Iterable[Path]) -> Checkpoint | None:
    """Return the first undamaged checkpoint, or None; log a warning about each damaged one before it.

    All files of these checkpoints are read.
    """
    damaged: list[str] = []
    sound = None
    for folder in folders:
        try:
            checkpoint = open_checkpoint(folder)
            checkpoint.verify()
        except CheckpointError as error:
            damaged.append(f"{folder} is damaged: {error.why}")
        else:
            sound = checkpoint
            break
    instead = "no other one is left" if sound is None else f"the checkpoint of step {sound.step} is used instead"
    for words in damaged:
        _LOGGER.warning("%s; %s", words, instead)
    return sound


def load_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in the folder `path`, complete or not.

    Raises:
        CheckpointError: there is no manifest, its version is unknown, or a field is invalid.
    """
    try:
        return read_model(path / MANIFEST, ManifestFile)
    except OSError as error:
        why = "there is no such folder" if not path.is_dir() else f"its {MANIFEST} {read_fault(error)}"
        raise CheckpointError("this is not a complete checkpoint", where=str(path), why=why, help=_ANOTHER) from None


def config_hash(text: str) -> str:
    """Return a digest of a resolved configuration; `text` is its YAML."""
    return sha256(text.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the versions for a checkpoint's manifest, with that of torch if installed."""
    from importlib.metadata import PackageNotFoundError, version

    versions_by_name = {"rlinf": __version__, "python": platform.python_version()}
    try:
        versions_by_name["torch"] = version("torch")
    except PackageNotFoundError:
        return versions_by_name
    return versions_by_name


def folder_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"global_step_{step}"


def look_at(path: Path) -> Checkpoint | str:
    """Return the checkpoint in a folder, or why it is not complete."""
    try:
        return open_checkpoint(path)
    except CheckpointError as error:
        return error.why or error.message


def _damage(path: Path, files: Mapping[str, int]) -> str | None:
    """Return a description of the first missing or resized file, or None; `files` holds sizes by name."""
    for name, size in files.items():
        try:
            size_on_disk = os.stat(path / name).st_size
        except OSError:
            return f"`{name}` is missing"
        if size_on_disk != size:
            return f"`{name}` has {size_on_disk} bytes, {size} were written"
    return None


def changed_file(
    path: Path, files: Mapping[str, int], digests: Mapping[str, str], most: float = math.inf
) -> str | None:
    """Return a description of the first file whose digest differs, or None; reads at most `most` bytes, small first."""
    for name, size in sorted(files.items(), key=lambda file: file[1]):
        most -= size
        if not digests or most < 0:
            return None
        try:
            digest = file_sha256(path / name)
        except OSError as error:
            return f"`{name}` cannot be read: {error.strerror or error}"
        if digest != digests.get(name):
            return f"`{name}` was changed: its SHA-256 differs from the one in {MANIFEST}"
    return None


def _shown(value: object) -> str:
    return "not set" if value is None else f"`{value}`"


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits; the file is read in pieces.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return file_digest(cast("BufferedReader", file), "sha256").hexdigest()
