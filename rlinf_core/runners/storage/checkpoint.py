"""Checkpoints: written to a temporary folder, verified, and renamed atomically, so that they are complete or absent.

checkpoints/
  global_step_100/          complete: it has a manifest, and every file that the manifest lists
    manifest.json
    ...                     whatever the workers wrote
  .writing-global_step_200  being written, or left behind by a killed run
  latest                    the name of the newest, for users and other tools
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import file_digest, sha256
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, cast

from pydantic import AfterValidator, Field

from rlinf_core.errors import CheckpointError
from rlinf_core.foreign.file_models import Bytes, FileModel, Moment, Name, Rank, Step, read_model
from rlinf_core.foreign.files import open_regular, read_fault
from rlinf_core.foreign.write_fault import write_fault
from rlinf_core.runners.storage import durable
from rlinf_core.version import __version__

if TYPE_CHECKING:
    from rlinf_core.job.recipe import Fact

SCHEMA: Final = "rlinf.checkpoint/1"
MANIFEST: Final = "manifest.json"
LATEST: Final = "latest"
# Bytes of a checkpoint that commands read which only look at it, in a second or two.
GLANCE: Final = 1 << 30
KEEP_ALL: Final = -1

_LOGGER: Final = logging.getLogger("rlinf")
_NAME: Final = re.compile(r"global_step_(\d+)")
_WRITING: Final = ".writing-"
_REPLACED: Final = ".replaced-"
_DISCARDED: Final = ".discarded-"
_ANOTHER: Final = "name another `global_step_N` folder, or `runner.resume_dir=auto` for the newest complete one"
_READ_AT_ONCE: Final = min(8, os.cpu_count() or 1)


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


_Schema = Annotated[Literal["rlinf.checkpoint/1"], Field(alias="schema")]


class Manifest(FileModel):
    """The description of a checkpoint, stored in it as `manifest.json`.

    Attributes:
        step: the training step after which it was written.
        config_hash: the hash of the run's configuration.
        facts: values that a resuming run must share, by the path of the key, as in `actor.model.hidden_dim`.
        metrics: the newest value of every metric.
        weight_version: number of weight updates.
        world_sizes: number of processes of each component; need not match.
        versions: the versions of rlinf, python and torch.
        time: when it was written, in seconds since 1970.
        files: size in bytes of every file, by its path within the checkpoint. `CheckpointStore.commit` fills it in.
        digests: SHA-256 of every file in hexadecimal digits, by the same paths; empty where an rlinf wrote it that kept
            none. `CheckpointStore.commit` fills it in.
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

        `facts` are those of the run, as `Manifest.facts`. Facts missing in the checkpoint are not compared.

        Raises:
            CheckpointError: with every difference.
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
            CheckpointError: with the first damaged file.
        """
        if not self.manifest.digests:
            _LOGGER.warning("%s has no digests: it is from an earlier rlinf, and only sizes are verified", self.path)
        verify_files(self.path, self.manifest)


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: their folder; created with the first one.
        keep: how many of the newest complete ones to keep, besides a snapshot; -1: all.
    """

    def __init__(self, folder: Path, keep: int = KEEP_ALL) -> None:
        self.folder = folder
        self.keep = keep

    def begin(self, step: int) -> Path:
        """Return an empty temporary folder, for the workers to write the checkpoint of `step` into before `commit`.

        Partial checkpoints of earlier processes are removed: a run has one writer.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        work = self.folder / f"{_WRITING}{_name(step)}"
        try:
            self.recover()
            work.mkdir(parents=True)
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        return work

    def commit(self, step: int, manifest: Manifest) -> Path:
        """Turn the files written since `begin` into the checkpoint of `step`, and remove surplus checkpoints.

        An existing one of the same step is replaced, atomically.

        Returns:
            Its folder, `global_step_N`.

        Raises:
            CheckpointError: `begin` was not called for this step, or the folder cannot be written.
        """
        work, final = self.folder / f"{_WRITING}{_name(step)}", self.folder / _name(step)
        if not work.is_dir():
            raise CheckpointError(f"the checkpoint of step {step} was not begun", where=str(self.folder))
        try:
            complete = manifest.model_copy(
                update={
                    "step": step,
                    "time": manifest.time or time.time(),
                    "versions": manifest.versions or versions(),
                    **_described(work),
                }
            )
            durable.sync_tree(work)
            durable.write_whole(work / MANIFEST, _encode(complete))
            if final.exists():
                durable.rename(final, self.folder / f"{_REPLACED}{final.name}")
            durable.rename(work, final)
            durable.write_whole(self.folder / LATEST, f"{final.name}\n")
            self._retain(final)
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        return final

    def abandon(self, step: int) -> None:
        """Remove the files written since `begin`, which are incomplete and may have filled the disk."""
        durable.remove_tree(self.folder / f"{_WRITING}{_name(step)}")

    def latest(self) -> Checkpoint | None:
        """Return the complete checkpoint of the highest step, or None; for use, take `latest_sound`.

        Determined from the folders, not from the file `latest`: a run can be killed between the two.
        """
        return next(iter(reversed(self.complete())), None)

    def latest_sound(self) -> Checkpoint | None:
        """Return the undamaged checkpoint of the highest step, or None; see `first_sound`."""
        return first_sound(self.folders())

    def complete(self) -> list[Checkpoint]:
        """Return all complete checkpoints, lowest step first."""
        return [look for look in map(_look, reversed(self.folders())) if isinstance(look, Checkpoint)]

    def damaged(self, read: int = 0) -> list[str]:
        """Return in words which checkpoints lack files, or have cut or changed ones, and which is used.

        Args:
            read: bytes of files that are read, the smallest first, to find changes of the one that is used; of others
                sizes are compared.
        """
        looks: list[tuple[Path, Checkpoint | str]] = []
        used: Checkpoint | None = None
        for path in self.folders():
            look = _look(path)
            if used is None and isinstance(look, Checkpoint):
                look = _change(path, look.manifest.files, look.manifest.digests, read) or look
                used = look if isinstance(look, Checkpoint) else None
            looks.append((path, look))
        complete = [f"that of step {look.step} is used instead" for _, look in looks if isinstance(look, Checkpoint)]
        instead = next(iter(complete), "no other one is left")
        return [
            f"checkpoint {path.name} is damaged: {look}; {instead}" for path, look in looks if isinstance(look, str)
        ]

    def folders(self) -> list[Path]:
        """Return the folders of checkpoints, damaged ones included, highest step first."""
        folders = [(int(match[1]), path) for path in self._entries() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(folders, reverse=True)]

    def recover(self) -> None:
        """Clean up after a killed process. Only the writing process may call this."""
        for path in self._entries():
            if path.name.startswith((_WRITING, _DISCARDED)):
                durable.remove_tree(path)
            elif path.name.startswith(_REPLACED):
                final = self.folder / path.name.removeprefix(_REPLACED)
                if final.exists():
                    durable.remove_tree(path)
                else:
                    durable.rename(path, final)
            elif path.name.startswith(".") and path.name.endswith(".part"):
                path.unlink(missing_ok=True)

    def _retain(self, newest: Path) -> None:
        """Remove surplus checkpoints and earlier snapshots, each renamed first so that it vanishes atomically."""
        done = self.complete()
        lasting = [checkpoint for checkpoint in done if not checkpoint.manifest.snapshot]
        surplus = lasting[: -self.keep] if self.keep != KEEP_ALL else []
        replaced = [checkpoint for checkpoint in done if checkpoint.manifest.snapshot and checkpoint.path != newest]
        for old in (*surplus, *replaced):
            durable.rename(old.path, self.folder / f"{_DISCARDED}{old.path.name}")
        for path in self._entries():
            if path.name.startswith((_REPLACED, _DISCARDED)):
                durable.remove_tree(path)

    def _entries(self) -> list[Path]:
        return sorted(self.folder.iterdir()) if self.folder.is_dir() else []


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the complete checkpoint in a folder `global_step_N`.

    Raises:
        CheckpointError: there is none, or it is not complete.
    """
    manifest = load_manifest(path)
    damage = _damage(path, manifest.files)
    if damage:
        raise CheckpointError("the checkpoint is not complete", where=str(path), why=damage, help=_ANOTHER)
    return Checkpoint(manifest.step, path, manifest)


def sound_checkpoint(path: Path) -> Checkpoint:
    """Return the undamaged checkpoint in a folder `global_step_N`, all of whose files are read.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    return checkpoint


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is named like a checkpoint, damaged or not."""
    return _NAME.fullmatch(path.name) is not None


def verify_files(path: Path, manifest: Manifest | None = None, within: Sequence[str] = ("",)) -> None:
    """Read the files of the checkpoint in a folder, and compare them with the digests in its manifest.

    Args:
        path: the folder `global_step_N`.
        manifest: the manifest of the checkpoint; None: it is loaded.
        within: path prefixes of the files to verify; all by default.

    Raises:
        CheckpointError: a file is missing or damaged. If the manifest has no digests, only sizes are compared.
    """
    manifest = load_manifest(path) if manifest is None else manifest
    begin = tuple(within)
    files = {name: size for name, size in manifest.files.items() if name.startswith(begin)}
    damage = _damage(path, files) or _change(path, files, manifest.digests)
    if damage is not None:
        raise CheckpointError("the checkpoint is damaged", where=str(path), why=damage, help=_ANOTHER)


def first_sound(folders: Iterable[Path]) -> Checkpoint | None:
    """Return the first undamaged checkpoint, or None; warn about each damaged one, with what is used instead.

    All files of the checkpoints are read.
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
        CheckpointError: there is none, it has an unknown version, or a field is invalid.
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
    """Return the versions for a checkpoint's manifest, with torch's if installed."""
    from importlib.metadata import PackageNotFoundError, version

    versions_by_name = {"rlinf": __version__, "python": platform.python_version()}
    try:
        versions_by_name["torch"] = version("torch")
    except PackageNotFoundError:
        return versions_by_name
    return versions_by_name


def _name(step: int) -> str:
    return f"global_step_{step}"


def _look(path: Path) -> Checkpoint | str:
    """Return the checkpoint in a folder, or why it is not complete."""
    try:
        return open_checkpoint(path)
    except CheckpointError as error:
        return error.why or error.message


def _damage(path: Path, files: Mapping[str, int]) -> str | None:
    """Return the first missing or resized one of the files, given by name with their sizes, in words."""
    for name, size in files.items():
        try:
            size_on_disk = os.stat(path / name).st_size
        except OSError:
            return f"`{name}` is missing"
        if size_on_disk != size:
            return f"`{name}` has {size_on_disk} bytes, {size} were written"
    return None


def _change(path: Path, files: Mapping[str, int], digests: Mapping[str, str], most: float = math.inf) -> str | None:
    """Return the first of the files whose digest is another one, in words; at most so many bytes are read."""
    for name, size in sorted(files.items(), key=lambda file: file[1]):
        most -= size
        if not digests or most < 0:
            return None
        try:
            digest = _digest(path / name)
        except OSError as error:
            return f"`{name}` cannot be read: {error.strerror or error}"
        if digest != digests.get(name):
            return f"`{name}` was changed: its SHA-256 differs from the one in {MANIFEST}"
    return None


def _encode(manifest: Manifest) -> str:
    # JSON has no NaN: it is written as null.
    metrics = {
        name: value if value is not None and math.isfinite(value) else None for name, value in manifest.metrics.items()
    }
    return json.dumps({**manifest.model_dump(by_alias=True, warnings=False), "metrics": metrics}, indent=2) + "\n"


def _shown(value: object) -> str:
    return "not set" if value is None else f"`{value}`"


def _unwritable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        "a checkpoint cannot be written",
        where=str(folder),
        why=write_fault(folder, error),
        help="free some space or fix its permissions; earlier checkpoints are intact",
    )


def _described(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the size of every file in bytes, and its digest, each by the file's path within the folder.

    Several files are read at once: hashing, 0.7 s a GiB, releases Python's lock.

    Raises:
        OSError: one cannot be read.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    names = sorted(paths)
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        digests = pool.map(_digest, (paths[name] for name in names))
        return {
            "files": {name: paths[name].stat().st_size for name in names},
            "digests": dict(zip(names, digests, strict=True)),
        }


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits; it is read in pieces.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return file_digest(cast("BufferedReader", file), "sha256").hexdigest()
