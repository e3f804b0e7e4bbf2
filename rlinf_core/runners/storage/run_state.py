"""The state of a run, as `run.json` keeps it. Imports nothing heavy: commands look into run folders too."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from rlinf_core.config.sections.runner import RESUME_NEWEST
from rlinf_core.errors import CheckpointError, RunError
from rlinf_core.node.node_processes import identity
from rlinf_core.runners.storage.checkpoint import Checkpoint, CheckpointStore, first_sound, open_checkpoint
from rlinf_core.runners.storage.run_status import RunStatus

SCHEMA: Final = "rlinf.run/1"
STATE: Final = "run.json"


class RunState(NamedTuple):
    """The state of a run, in `run.json`. Moments are seconds since 1970.

    Attributes:
        recipe: what is trained.
        experiment: the name that `runner.resume_dir: auto` looks for.
        status: a `RunStatus`.
        step: the last step that is done.
        reason: why it failed, in one line, else empty.
        pid, host: of the process that drives it.
        start: tells that process from a later one with its pid, as `rlinf_core.node.node_processes.identity` does.
        address: where its Ray is reached, or was, as in `10.0.0.1:6379`; empty before there is one.
        created, updated: when the folder was made, and when this was written.
        ended: when the run ended, or None.
        resumed_from: the checkpoint that it continued from last, or None.
        checkpoints: the folder of its checkpoints.
        earlier: while the run is being resumed and has no workers yet, the fields of how it had ended before; else
            None.
    """

    recipe: str
    experiment: str
    status: str = RunStatus.RUNNING
    step: int = 0
    reason: str = ""
    pid: int = 0
    host: str = ""
    start: str = ""
    address: str = ""
    created: float = 0.0
    updated: float = 0.0
    ended: float | None = None
    resumed_from: str | None = None
    checkpoints: str = "checkpoints"
    earlier: Mapping[str, Any] | None = None

    @property
    def here(self) -> bool:
        """Whether the run was started on this machine, so that its process can be looked at."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether it is going on: it says so, and where that can be seen its process is there."""
        return self.status == RunStatus.RUNNING and (not self.here or identity(self.pid) == self.start)


def read_state(folder: Path) -> RunState:
    """Return the state of the run in a folder.

    Raises:
        RunError: it is not the folder of a run.
    """
    try:
        data: Any = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = f"there is no `{STATE}` in it" if isinstance(error, FileNotFoundError) else f"`{STATE}` cannot be read"
        raise RunError("this is not the folder of a run", where=str(folder), why=why) from None
    if not isinstance(data, dict) or cast("dict[str, Any]", data).get("schema") != SCHEMA:
        raise RunError("this is not the folder of a run", where=str(folder), why=f"`{STATE}` is not `{SCHEMA}`")
    fields = cast("dict[str, Any]", data)
    try:
        return RunState(**{name: value for name, value in fields.items() if name in RunState._fields})
    except TypeError:
        raise RunError("this is not the folder of a run", where=str(folder), why=f"`{STATE}` lacks fields") from None


def runs_in(log_path: Path) -> Iterator[tuple[Path, RunState]]:
    """Return the run folders in `log_path`; whatever else lies there is none of ours."""
    try:
        paths = sorted(log_path.iterdir())
    except OSError:
        return
    for path in paths:
        try:
            yield path, read_state(path)
        except RunError:
            continue


def find_source(resume_dir: str | None, log_path: Path, experiment: str) -> Checkpoint | None:
    """Return the checkpoint that `runner.resume_dir` means; None where a run begins anew.

    Raises:
        CheckpointError: there is no complete checkpoint where it says.
    """
    if resume_dir is None:
        return None
    if resume_dir == RESUME_NEWEST:
        stores = [
            CheckpointStore(path / run.checkpoints) for path, run in runs_in(log_path) if run.experiment == experiment
        ]
        complete = [each for store in stores for each in store.complete()]
        return first_sound(sorted(complete, key=lambda each: each.manifest.time, reverse=True))
    path = Path(resume_dir).absolute()
    if (path / STATE).is_file():
        store = CheckpointStore(path / read_state(path).checkpoints)
    elif (path / "latest").is_file():
        store = CheckpointStore(path)
    else:
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        return checkpoint
    latest = store.latest()
    if latest is None:
        raise CheckpointError("there is no complete checkpoint to continue from", where=str(path))
    latest.verify()
    return latest


def run_of(checkpoint: Path, log_path: Path) -> Path | None:
    """Return the run folder that a checkpoint belongs to; None for one that was copied elsewhere."""
    store = checkpoint.resolve().parent
    # The second is where `actor.checkpoint_save_path` keeps checkpoints away from their run.
    for path in (store.parent, log_path / store.name):
        try:
            state = read_state(path)
        except RunError:
            continue
        if (path / state.checkpoints).resolve() == store:
            return path
    return None
