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
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from rlinf_core.errors import CheckpointError
from rlinf_core.foreign.files import write_fault
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import (
    FOLDER_NAME,
    MANIFEST,
    Checkpoint,
    Manifest,
    changed_file,
    file_sha256,
    first_sound,
    folder_name,
    look_at,
    versions,
)

LATEST: Final = "latest"
KEEP_ALL: Final = -1
_WRITING: Final = ".writing-"
_REPLACED: Final = ".replaced-"
_DISCARDED: Final = ".discarded-"
_READ_AT_ONCE: Final = min(8, os.cpu_count() or 1)


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: the folder of the checkpoints, created with the first one.
        keep: the number of newest complete checkpoints to keep, besides a snapshot; -1 for all.
    """

    def __init__(self, folder: Path, keep: int = KEEP_ALL) -> None:
        self.folder = folder
        self.keep = keep

    def begin(self, step: int) -> Path:
        """Return an empty temporary folder into which the workers write the checkpoint of `step` before `commit`.

        Partial checkpoints of earlier processes are removed: a run has one writer.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        work = self.folder / f"{_WRITING}{folder_name(step)}"
        try:
            self.recover()
            # Not with its parents: a run whose folder was renamed meanwhile must not save to a new one.
            self.folder.mkdir(exist_ok=True)
            work.mkdir()
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        return work

    def commit(self, step: int, manifest: Manifest) -> Path:
        """Turn the files written since `begin` into the checkpoint of `step`, and remove surplus checkpoints.

        An existing checkpoint of the same step is replaced atomically.

        Returns:
            The folder of the checkpoint, `global_step_N`.

        Raises:
            CheckpointError: `begin` was not called for this step, or the folder cannot be written.
        """
        try:
            final = self._publish(step, manifest)
            durable.write_whole(self.folder / LATEST, f"{final.name}\n")
            self._retain(final)
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        return final

    def replace(self, checkpoint: Checkpoint) -> None:
        """Replace the files of an existing checkpoint by those written since `begin`, atomically; remove no other one.

        Raises:
            CheckpointError: see `commit`.
        """
        try:
            self._publish(checkpoint.step, checkpoint.manifest)
            self.recover()
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def _publish(self, step: int, manifest: Manifest) -> Path:
        work, final = self.folder / f"{_WRITING}{folder_name(step)}", self.folder / folder_name(step)
        if not work.is_dir():
            raise CheckpointError(f"the checkpoint of step {step} was not begun", where=str(self.folder))
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
        earlier = self.folder / f"{_REPLACED}{final.name}"
        if final.exists():
            durable.rename(final, earlier)
        try:
            durable.rename(work, final)
        except OSError:
            if earlier.exists():
                durable.rename(earlier, final)
            raise
        return final

    def abandon(self, step: int) -> None:
        """Remove the files written since `begin`, which are incomplete and may have filled the disk."""
        durable.remove_tree(self.folder / f"{_WRITING}{folder_name(step)}")

    def latest(self) -> Checkpoint | None:
        """Return the complete checkpoint of the highest step, or None; to load it, use `latest_sound`.

        It is determined from the folders, not from the file `latest`: a run can be killed between the two writes.
        """
        return next(iter(reversed(self.complete())), None)

    def latest_sound(self) -> Checkpoint | None:
        """Return the undamaged checkpoint of the highest step, or None; see `first_sound`."""
        return first_sound(self.folders())

    def require_sound(self) -> Checkpoint:
        """Return the undamaged checkpoint of the highest step.

        Raises:
            CheckpointError: there is none.
        """
        newest = self.latest_sound()
        if newest is not None:
            return newest
        where = str(self.folder)
        if self.folders():
            help = "name another one: a folder `global_step_N`"
            raise CheckpointError("the run has no sound checkpoint", where=where, help=help)
        why = "`runner.save_interval` says when one is saved, and a run that ends before saves none"
        raise CheckpointError("the run has saved no checkpoint", where=where, why=why)

    def complete(self) -> list[Checkpoint]:
        """Return all complete checkpoints, lowest step first."""
        return [look for look in map(look_at, reversed(self.folders())) if isinstance(look, Checkpoint)]

    def damaged(self, read: int = 0) -> list[str]:
        """Return descriptions of the damaged checkpoints, each with the checkpoint that is used instead.

        Args:
            read: the most bytes of files of each checkpoint, small files first, whose digests are compared until one
                is found undamaged; of further checkpoints only sizes are compared.
        """
        looks: list[tuple[Path, Checkpoint | str]] = []
        used: Checkpoint | None = None
        for path in self.folders():
            look = look_at(path)
            if used is None and isinstance(look, Checkpoint):
                look = changed_file(path, look.manifest.files, look.manifest.digests, read) or look
                used = look if isinstance(look, Checkpoint) else None
            looks.append((path, look))
        complete = [f"that of step {look.step} is used instead" for _, look in looks if isinstance(look, Checkpoint)]
        instead = next(iter(complete), "no other one is left")
        return [
            f"checkpoint {path.name} is damaged: {look}; {instead}" for path, look in looks if isinstance(look, str)
        ]

    def folders(self) -> list[Path]:
        """Return the folders of all checkpoints, including damaged ones, highest step first."""
        folders = [(int(match[1]), path) for path in self._entries() if (match := FOLDER_NAME.fullmatch(path.name))]
        return [path for _, path in sorted(folders, reverse=True)]

    def recover(self) -> None:
        """Clean up after a killed process. Only the process that writes checkpoints may call this."""
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
        """Remove surplus checkpoints and earlier snapshots; each is renamed first, so that it vanishes atomically."""
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


def _encode(manifest: Manifest) -> str:
    # NaN is written as null, since JSON has no NaN.
    metrics = {
        name: value if value is not None and math.isfinite(value) else None for name, value in manifest.metrics.items()
    }
    return json.dumps({**manifest.model_dump(by_alias=True, warnings=False), "metrics": metrics}, indent=2) + "\n"


def _unwritable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        "a checkpoint cannot be written",
        where=str(folder),
        why=write_fault(folder, error),
        help="free some space or fix its permissions; earlier checkpoints are intact",
    )


def _described(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the size in bytes and the digest of every file, by its path within the folder.

    Several files are read in parallel: hashing takes 0.7 s per GiB, and releases Python's lock.

    Raises:
        OSError: a file cannot be read.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    names = sorted(paths)
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        digests = pool.map(file_sha256, (paths[name] for name in names))
        return {
            "files": {name: paths[name].stat().st_size for name in names},
            "digests": dict(zip(names, digests, strict=True)),
        }
