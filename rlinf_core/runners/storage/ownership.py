"""Ownership marks of checkpoint folders outside of their run's folder.

`run.json` may name any folder, and a copy of a run names the same one as the original. So an outside folder belongs to
a run only if its mark has the run's id, and the path and inode of the run's folder.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from rlinf_core.foreign.file_models import FileModel, read_model
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.run_state import RunState

MARK: Final = ".rlinf-run.json"
SCHEMA: Final = "rlinf.checkpoints/1"
_MOST_BYTES: Final = 1 << 16


class Mark(FileModel):
    """The owner of a checkpoint folder, from its mark.

    Attributes:
        run_id: the id of the run.
        folder, inode: the folder and inode of the run's folder, which a copy does not share.
        place: the path of the checkpoint folder itself, which a copy does not share.
    """

    run_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    folder: Annotated[str, Field(max_length=4096)]
    inode: Annotated[int, Field(gt=0)]
    place: Annotated[str, Field(max_length=4096)]


def outside(run: Path, state: RunState) -> Path | None:
    """Return the folder of a run's checkpoints if it is outside of the run's folder; else None."""
    path = Path(os.path.normpath(run / state.checkpoints))
    return None if path.is_relative_to(run) and path != run else path


def mark(checkpoints: Path, run: Path, run_id: str) -> None:
    """Mark a new checkpoint folder as owned by the run in the folder `run`.

    Raises:
        OSError: it cannot be written.
    """
    owner = Mark(run_id=run_id, folder=str(run.resolve()), inode=run.stat().st_ino, place=str(checkpoints.resolve()))
    durable.write_whole(checkpoints / MARK, json.dumps({"schema": SCHEMA, **owner.model_dump()}, indent=1) + "\n")


def why_not_own(run: Path, state: RunState) -> str | None:
    """Return why a run may not write to or delete its checkpoint folder; None if it may."""
    path = outside(run, state)
    if path is None:
        return _why_linked(run, state)
    if path.is_symlink():
        return "it is a link"
    if not state.run_id:
        return "the run is from an earlier rlinf, which left no mark there"
    try:
        if not stat.S_ISREG((path / MARK).lstat().st_mode):
            return f"its `{MARK}` is not a file"
        owner = read_model(path / MARK, Mark, _MOST_BYTES)
    except FileNotFoundError:
        return f"it has no mark of this run, `{MARK}`"
    except OSError:
        return f"its `{MARK}` cannot be read"
    if owner.run_id != state.run_id or owner.place != str(path.resolve()):
        return "it is marked as owned by another run"
    if (owner.folder, owner.inode) != (str(run.resolve()), run.stat().st_ino):
        return f"it is marked as owned by the run in {owner.folder}; this run is a copy, or was moved"
    return None


def _why_linked(run: Path, state: RunState) -> str | None:
    """Return which part of a path below the run's folder is a link."""
    path = run
    for part in Path(os.path.normpath(state.checkpoints)).parts if not os.path.isabs(state.checkpoints) else ():
        path /= part
        if path.is_symlink():
            return f"{path} is a link"
    return None
