"""Deletion of a run: its folder, and checkpoints elsewhere that are certainly its own."""

from __future__ import annotations

import shutil

from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import STATE, outside, why_not_own


def delete_run(run: RunFolder) -> None:
    """Delete a finished run: its checkpoints, then its folder, the state file last.

    An interrupted deletion leaves a run that can be deleted again. Links are deleted, not followed. Checkpoints outside
    of the folder are deleted only if they bear this run's mark (`ownership`).

    Raises:
        OSError: something cannot be deleted, the run has (or may have) started again, or its folder is a link.
        RunError: its state cannot be read.
    """
    if run.path.is_symlink():
        raise OSError(None, "it is a link; delete the run at its target, or remove the link by hand", str(run.path))
    # A command that resumes the run claims it, too.
    with durable.claimed(run.path / STATE) as ours:
        if not ours or run.refresh().going_on:
            raise OSError(None, "the run has started again", str(run.path))
        elsewhere = outside(run.path, run.state)
        if elsewhere is not None and why_not_own(run.path, run.state) is None:
            shutil.rmtree(elsewhere)
        for child in sorted(run.path.iterdir()):
            if child.name == STATE:
                continue
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()
        (run.path / STATE).unlink()
    run.path.rmdir()
