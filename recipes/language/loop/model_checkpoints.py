"""The parts of a language model's checkpoint: the state to resume from, and a folder that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from recipes.language.config import ModelRunnerConfig
from recipes.language.prompts.prompt_plan import PromptPlan, Restored
from rlinf_core import CheckpointError
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.worker.group.handle import wait_together

# Folders of a checkpoint.
STATE: Final = "actor"
MODEL: Final = "huggingface"
_DATA_FILE: Final = "data.json"


def save_parts(actor: Any, folder: Path, runner: ModelRunnerConfig, *others: Any) -> None:
    """Write the checkpoint in the format of `runner.save_format`.

    Args:
        actor: the group whose model it is.
        folder: the folder of the checkpoint.
        runner: section of the file.
        others: further groups with their own state.
    """
    if runner.saves_state:
        wait_together(*(group.save_checkpoint(str(folder)) for group in (actor, *others)))
    if runner.saves_model:
        actor.save_model(str(folder / MODEL)).wait()


def require_state(folder: Path) -> None:
    """Check that a checkpoint can be resumed from.

    Raises:
        CheckpointError: it holds a model and no state.
    """
    if (folder / MODEL).is_dir() and not (folder / STATE).is_dir():
        raise CheckpointError(
            "the checkpoint cannot be resumed from: it has a model, and no state of the optimizer",
            where=str(folder),
            why="it was written with `runner.save_format: huggingface`",
            help=f"name its folder `{MODEL}` in `actor.model.model_path` to start from its weights; write"
            " `save_format: both` to resume",
        )


def write_plan(folder: Path, plan: PromptPlan, unfinished: Mapping[int, int | None]) -> None:
    """Write which problems were used; `unfinished` as `PromptPlan.state` takes it."""
    (folder / _DATA_FILE).write_text(json.dumps(plan.state(unfinished)))


def read_plan(folder: Path, plan: PromptPlan, step: int, version: int) -> Restored:
    """Restore a plan of prompts from what `write_plan` wrote; see `PromptPlan.restore`.

    Raises:
        CheckpointError: it does not exist, or is invalid.
    """
    file = folder / _DATA_FILE
    try:
        return plan.restore(load_json_object(read_bounded(file), non_finite=True), step, version)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "the checkpoint does not record which problems were used",
            where=str(file),
            why=str(error),
            help="resume from another checkpoint",
        ) from None
