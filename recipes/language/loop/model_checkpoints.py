"""Parts of a language model's checkpoint: the state to resume from, its prompts, and a folder for transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from recipes.language.config.language_config import ModelRunnerConfig
from recipes.language.loop.generation import PromptService, wait_for
from recipes.language.loop.group_accounts import Arrivals
from recipes.language.loop.prompt_plan import PromptPlan
from recipes.language.loop.worker_groups import LanguageActorGroup
from rlinf_core import CheckpointError
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.runners.events import ItemFates
from rlinf_core.worker.handle import wait_together

# Folders of a checkpoint.
STATE: Final = "actor"
MODEL: Final = "huggingface"
_DATA_FILE: Final = "data.json"


def save_parts(actor: Any, folder: Path, runner: ModelRunnerConfig, *others: Any) -> None:
    """Write the checkpoint in the format of `runner.save_format`.

    Args:
        actor: the group that trains the model.
        folder: the folder of the checkpoint.
        runner: the section `runner` of the configuration.
        others: further groups with a state.
    """
    if runner.saves_state:
        wait_together(*(group.save_checkpoint(str(folder)) for group in (actor, *others)))
    if runner.saves_model:
        actor.save_model(str(folder / MODEL)).wait()


def require_state(folder: Path) -> None:
    """Check that a checkpoint can be resumed from.

    Raises:
        CheckpointError: the checkpoint has a model but no state.
    """
    if (folder / MODEL).is_dir() and not (folder / STATE).is_dir():
        raise CheckpointError(
            "the checkpoint cannot be resumed from: it has a model, and no state of the optimizer",
            where=str(folder),
            why="it was written with `runner.save_format: huggingface`",
            help=f"name its folder `{MODEL}` in `actor.model.model_path` to start from its weights; write"
            " `save_format: both` to resume",
        )


class PromptCheckpoints:
    """The prompts of a run in its checkpoints: the problems used, buffered groups, and unfinished answers.

    Args:
        actor: the group that keeps answers.
        plan: the plan of the run.
        arrivals: the accounts of groups that are scored in the meantime.

    Attributes:
        in_flight: the prompts not trained on yet at the last checkpoint, with their fates.
        resumed: the prompts in flight of the checkpoint that the run resumes from, with their fates.
    """

    def __init__(self, actor: LanguageActorGroup, plan: PromptPlan, arrivals: Arrivals) -> None:
        self._actor, self._plan, self._arrivals = actor, plan, arrivals
        self.in_flight: ItemFates = {}
        self.resumed: ItemFates = {}
        # The numbers of a checkpoint's prompts that were restarted and continued, for the next step's metrics.
        self._again = self._continued = 0

    def save_unfinished(self, folder: Path, service: PromptService, step: int) -> Mapping[int, int | None]:
        """Write the unfinished answers while they continue.

        Returns:
            The positions of their problems, with the version of the oldest weights that drew a token; None where none
            is drawn.
        """
        if not (self._plan.in_flight and service.keep_unfinished(step)):
            return {}
        saved = self._actor.save_unfinished(str(folder))
        ((slots, *_),) = wait_for([saved], lambda: self._arrivals.take(service.poll()))
        # Wait for the finished answers that are still being scored.
        while not self._plan.under_way <= set(slots):
            self._arrivals.take(service.wait())
        return slots

    def save(self, folder: Path, unfinished: Mapping[int, int | None]) -> None:
        """Write buffered groups and the problems used; `unfinished` is what `save_unfinished` returned."""
        if slots := self._plan.buffered:
            self._actor.save_buffered(str(folder), slots).wait()
        (folder / _DATA_FILE).write_text(json.dumps(self._plan.state(unfinished)))
        self.in_flight = self._plan.in_flight_at_checkpoint(unfinished)

    def restore(self, folder: Path, step: int, version: int) -> None:
        """Restore plan and answers. Prompts without saved answers are restarted and counted.

        Raises:
            CheckpointError: the checkpoint lacks them, or they are invalid.
        """
        file = folder / _DATA_FILE
        try:
            restored = self._plan.restore(load_json_object(read_bounded(file), non_finite=True), step, version)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                "the checkpoint does not record which problems were used",
                where=str(file),
                why=str(error),
                help="resume from another checkpoint",
            ) from None
        if restored.slots:
            self._actor.load_buffered(str(folder), restored.slots).wait()
        if restored.continued:
            self._actor.load_unfinished(str(folder), restored.continued).wait()
        self._again, self._continued = restored.again, len(restored.continued)
        self.resumed = restored.fates

    def figures(self) -> dict[str, float]:
        """Return the numbers of a checkpoint's prompts restarted and continued since the last call, as metrics."""
        figures: dict[str, float] = {"rollout/prompted_again": self._again, "rollout/continued": self._continued}
        self._again = self._continued = 0
        return figures
