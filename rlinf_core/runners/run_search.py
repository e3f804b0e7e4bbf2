"""Search for runs and for the checkpoint that a run continues from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlinf_core.config.sections.runner import RESUME_NEWEST
from rlinf_core.errors import CheckpointError, RunError
from rlinf_core.runners.checkpoint import Checkpoint, CheckpointStore, open_checkpoint
from rlinf_core.runners.run_state import STATE, RunState, read_state


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
        found = [each for each in (store.latest() for store in stores) if each is not None]
        return max(found, key=lambda each: each.manifest.time, default=None)
    path = Path(resume_dir).absolute()
    if (path / STATE).is_file():
        store = CheckpointStore(path / read_state(path).checkpoints)
    elif (path / "latest").is_file():
        store = CheckpointStore(path)
    else:
        return open_checkpoint(path)
    latest = store.latest()
    if latest is None:
        raise CheckpointError("there is no complete checkpoint to continue from", where=str(path))
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
