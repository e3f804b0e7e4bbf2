"""Loading of trained policies for use outside of their run."""

from __future__ import annotations

import json
from pathlib import Path

from rlinf_core.errors import CheckpointError, ConfigError
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.job.find_recipe import find_recipe
from rlinf_core.job.load import Job, load_job
from rlinf_core.job.recipe import Policy, Recipe
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import CheckpointStore, is_checkpoint, sound_checkpoint
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import STATE

_DESCRIPTION = "policy.json"


def load_policy(path: str | Path, *, checkpoint: str | Path | None = None, device: str = "cpu") -> Policy:
    """Return a trained policy, ready to act. It needs neither a cluster nor the environment.

    Args:
        path: a run folder, for its newest checkpoint; a checkpoint `global_step_N`; or a folder that `rlinf
            export --format safetensors` wrote.
        checkpoint: another checkpoint of the run.
        device: its torch device.

    Raises:
        RunError: there is no such folder.
        CheckpointError: there is no checkpoint, or it cannot be read.
        ConfigError: the recipe does not support this, or the policy is of another recipe.
    """
    folder = Path(path)
    job: Job | None = None
    recipe: Recipe | None = None
    if (run := _run_of(folder)) is not None:
        # Findings about this machine, such as a missing simulator, do not matter here.
        job = load_job(str(run.config_file))
        recipe = job.recipe
    if checkpoint is not None or is_checkpoint(folder):
        folder = sound_checkpoint(Path(checkpoint or folder)).path
    else:
        store = run.checkpoints if run is not None and (folder / STATE).is_file() else CheckpointStore(folder)
        newest = store.latest_sound()
        if newest is None and store.folder != folder:
            raise CheckpointError("the run has no sound checkpoint", where=str(folder))
        folder = newest.path if newest is not None else folder
    if recipe is None:
        recipe = find_recipe(_recipe_of(folder))
    function = recipe.load(recipe.policy)
    if function is None:
        raise ConfigError(f"recipe `{recipe.name}` does not support `load_policy`")
    return function(folder, job.config if job is not None else None, device)


def note_step(folder: Path, step: int) -> None:
    """Add the training step of the weights to the description of an exported policy, if it has one."""
    file = folder / _DESCRIPTION
    if file.is_file():
        about = {**load_json_object(read_bounded(file)), "step": step}
        durable.write_whole(file, json.dumps(about, indent=1) + "\n")


def _run_of(folder: Path) -> RunFolder | None:
    """Return the run of a run folder, its `checkpoints` or one of its checkpoints, if it exists."""
    for path in (folder, folder.absolute().parent, folder.absolute().parent.parent):
        if (path / STATE).is_file():
            return RunFolder.open(path)
    return None


def _recipe_of(folder: Path) -> str:
    """Return the recipe's name of a policy folder outside of a run."""
    try:
        return str(load_json_object(read_bounded(folder / _DESCRIPTION))["recipe"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "there is no policy in the folder",
            where=str(folder),
            why=f"`{_DESCRIPTION}` is missing" if isinstance(error, OSError) else f"`{_DESCRIPTION}`: {error}",
            help="name a run, a checkpoint, or a folder of `rlinf export --format safetensors`",
        ) from None
