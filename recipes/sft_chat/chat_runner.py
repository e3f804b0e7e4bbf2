"""The loop of recipe `sft_chat`, and the program that `rlinf train` runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from recipes.language.loop.model_checkpoints import require_state, save_parts
from recipes.sft_chat.config import ChatConfig
from recipes.sft_chat.conversations import require_inputs
from recipes.training.comparing_worker import Comparing, comparisons_of
from rlinf_core import Cluster, HybridComponentPlacement, Job, Runner, WorkerGroup, mean_over_ranks, run_job
from rlinf_core.runners import events
from rlinf_core.runners.events import Listener
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.runner import NEVER
from rlinf_core.runners.storage.first_contact import note_comparisons
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.worker import WorkerReference
from rlinf_core.worker.worker_group import launch_together


class ChatRunner(Runner):
    """A runner that trains the actors on conversations, and evaluates the loss on others, if there are any.

    Args:
        cfg: the configuration of the job.
        actor: the workers.
        record: see `Runner`.
    """

    def __init__(self, cfg: ChatConfig, actor: WorkerGroup[ChatTraining], record: RunRecord | None = None) -> None:
        super().__init__(cfg, {"actor": actor}, record)
        # A worker group forwards method calls to all ranks, which its type does not show.
        self._actor = cast("Any", actor)
        self._settings = cfg.runner
        self._counts = ExampleCounts(0, 0)

    @property
    def last_step(self) -> int | None:
        """The last step of the run, None without an end; an epoch is a pass over the examples."""
        limits: list[int] = [] if self.config.max_steps == NEVER else [self.config.max_steps]
        if self.config.max_epochs != NEVER and self._counts.training:
            limits.append(math.ceil(self.config.max_epochs * self._counts.training / self.cfg.actor.global_batch_size))
        return min(limits, default=None)

    def start_workers(self) -> None:
        """Read the data, and load the model."""
        self._counts = self._actor.init_worker().wait()[0]
        self._note()

    def train_step(self, step: int) -> dict[str, float]:
        """Take an optimizer step."""
        with self.phase(step, events.ACTOR_TRAINING):
            return mean_over_ranks(self._actor.learn(step, self.last_step).wait())

    def evaluate_policy(self, step: int) -> dict[str, float] | None:
        """Return the loss on the evaluation conversations, if there are any."""
        if not self._counts.evaluation:
            return None
        self.record.emit(events.PhaseStarted(step, events.EVALUATE))
        return self._actor.evaluate().wait()[0]

    @property
    def keeps_state(self) -> bool:
        return self._settings.saves_state

    def write_checkpoint(self, folder: Path) -> None:
        """Write weights and optimizer, a folder that transformers loads, or both."""
        save_parts(self._actor, folder, self._settings)
        self._note()

    def read_checkpoint(self, folder: Path) -> None:
        """Load a checkpoint of `write_checkpoint`."""
        require_state(folder)
        self.weight_version = self._actor.load_checkpoint(str(folder)).wait()[0]

    def finish(self) -> None:
        """Write the trained model to the folder `model` in the run folder, for other programs."""
        if self._settings.saves_model and not self._settings.only_eval:
            self._actor.save_model(str(self.record.folder.path / "model")).wait()
            self._note()

    def _note(self) -> None:
        """Record the actors' comparisons."""
        note_comparisons(self.record.folder.path, comparisons_of([self._actor]))


class ExampleCounts(NamedTuple):
    """The numbers of examples for training and for evaluation."""

    training: int
    evaluation: int


Metrics: TypeAlias = dict[str, float]


class ChatTraining(Comparing, Protocol):
    """A worker that learns from conversations."""

    def init_worker(self) -> ExampleCounts: ...
    def learn(self, step: int, last_step: int | None, /) -> Metrics: ...
    def evaluate(self) -> Metrics: ...
    def save_checkpoint(self, folder: str, /) -> None: ...
    def load_checkpoint(self, folder: str, /) -> int: ...
    def save_model(self, folder: str, /) -> None: ...


# Named, not imported, as only workers need torch.
ACTOR = WorkerReference[ChatTraining]("recipes.sft_chat.chat_actor:ChatActor", ChatTraining, "actor")


def program(job: Job, folder: RunFolder, listener: Listener) -> None:
    """Train a language model on conversations as configured in `job`, and record the run in `folder`.

    Raises:
        RLinfError: see `run_job`; also a ConfigError if a row or the model's folder is not usable.
    """
    require_inputs(cast("ChatConfig", job.config))
    run_job(job, folder, listener, launch)


def launch(config: ChatConfig, cluster: Cluster, record: RunRecord) -> ChatRunner:
    """Place and start the workers, and return their runner."""
    placement = HybridComponentPlacement(config, cluster)
    actor = ACTOR.create_group(config)
    launch_together(cluster, {actor: placement.get_strategy("actor")})
    return ChatRunner(config, actor, record)
