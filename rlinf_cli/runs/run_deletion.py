"""The deletion of a run: its folder, and its checkpoints elsewhere where they are its own for certain."""

from __future__ import annotations

import shutil

from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.ownership import outside, why_not_own
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import STATE


def delete_run(run: RunFolder) -> None:
    """Delete a run that has ended: its checkpoints, then its folder, whose state goes last.

    What is cut short in between is still a run, which can be deleted again. Links are deleted, not followed.
    Checkpoints outside of the folder go only where they bear the mark of this very run (`ownership`).

    Raises:
        OSError: something cannot be deleted, the run goes on again or may do, or its folder is reached by a link.
        RunError: its state cannot be read any more.
    """
    if run.path.is_symlink():
        raise OSError(None, "it is a link; delete the run where that leads to, or the link by hand", str(run.path))
    # A command that goes on with the run claims it, too.
    with durable.claimed(run.path / STATE) as ours:
        if not ours or run.refresh().going_on:
            raise OSError(None, "the run has begun again", str(run.path))
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
