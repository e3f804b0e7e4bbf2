"""Workers that hold an engine, load its weights and offload it, and that answer prompts."""

from __future__ import annotations

import time

import torch

from recipes.language.answers.answer_batch import UnfinishedGroup, UnfinishedReport
from recipes.language.answers.answer_group import GroupOutlet
from recipes.language.answers.prompt_messages import (
    UNFINISHED,
    GenerationReport,
    Inbox,
    Prompt,
    orders_key,
    unfinished_key,
)
from recipes.language.config.language_config import LanguageConfig
from recipes.language.data.problem_sources import load_problems
from recipes.language.data.problems import PromptEncoder
from recipes.language.engines.engine import Engine
from recipes.language.engines.registry import make_engine
from recipes.language.loop.worker_groups import LanguageLayout
from recipes.language.models.load_model import make_tokenizer, stop_token_ids
from recipes.language.rules.model_rules import require_conversations
from recipes.language.weights.weight_transfer import IncomingWeights, WeightUpdate
from recipes.language.workers.request_tracker import Answering
from recipes.training.comparing_worker import ComparingWorker
from recipes.training.weights.weight_sync import receiver_ranks
from rlinf_core.runners.storage.first_contact import Difference


class EngineWorker(ComparingWorker):
    """A worker with an engine whose weights come from the actors."""

    config_section = "rollout"

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self._config = config
        self._sleeps = False

    def init_worker(self, layout: LanguageLayout) -> None:
        """Start the engine; its weights arrive with the first `sync_model_from_actor`."""
        config = self._config
        torch.set_num_threads(config.actor.threads)
        self._layout = layout
        self._tokenizer = make_tokenizer(config.actor)
        self._stops = stop_token_ids(self._tokenizer, config.actor.model.model_path)
        self._engine = self.make_engine(self._stops)

    def make_engine(self, stops: tuple[int, ...]) -> Engine:
        """Return the engine that answers; a subclass may wrap it.

        Args:
            stops: tokens that end every answer.
        """
        owner = str(self.worker_info.address)
        return make_engine(self._config, self._tokenizer, stops, self.torch_device, self._contact, owner)

    def sync_model_from_actor(self) -> int:
        """Load the weights that the actor sends, and return their version.

        Raises:
            RLinfError: the loaded weights differ from the sent ones.
        """
        self._wake()
        update = self._receive().wait()
        self._load(update)
        return update.version

    def _load(self, update: WeightUpdate) -> None:
        update.apply(self._engine)

    def _receive(self) -> IncomingWeights:
        """Start receiving weights from the actor."""
        layout, source = self._layout, self._rank % self._layout.actors
        ranks = receiver_ranks(source, layout.actors, layout.rollouts)
        groups = [(self._config.rollout.group_name, ranks)]
        actor = (self._config.actor.group_name, source)
        return IncomingWeights(lambda: self.broadcast(None, groups, actor, async_op=True), may_keep=len(ranks) == 1)

    def offload(self, weights_follow: bool) -> None:
        """Release accelerator memory until the next call: all of it if new weights arrive before the next answers.

        With a LoRA adapter, only the adapter arrives, so the weights stay.
        """
        whole = weights_follow and self._config.actor.model.adapter() is None
        self._engine.sleep(2 if whole else 1)
        self._sleeps = True

    def _wake(self) -> None:
        if self._sleeps:
            self._engine.wake()
            self._sleeps = False

    def _close(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()


class LanguageRolloutWorker(EngineWorker):
    """A worker that answers each prompt several times, and hands the answers to the reward workers."""

    def init_worker(self, layout: LanguageLayout) -> None:
        """Start the engine, whose weights arrive with the first `sync_model_from_actor`, and load the problems."""
        super().init_worker(layout)
        config = self._config
        data = config.data
        encoder = PromptEncoder.of(self._tokenizer, data)
        self._contact.compare(
            "conversations of the roles that are used",
            "the chat template of the tokenizer",
            lambda: require_conversations(config, encoder.template),
            cheap=True,
        )
        training, evaluation = load_problems(data, evaluation=False), load_problems(data, evaluation=True)
        self._counts = len(training), len(evaluation)
        counts = Difference(note=f"{len(training)} problems for training, {len(evaluation)} for evaluation")
        self._contact.keep("rows of `data`", "their keys and types", counts)
        self._answers = self.connect_channel(layout.answers)
        self._scored = self.connect_channel(layout.scored)
        self._outlet = GroupOutlet(self._answers, layout.rewards, keeps=config.runner.max_restarts.max > 0)
        self._answering = Answering(
            config,
            self._engine,
            encoder,
            self._stops,
            training=training,
            evaluation=evaluation,
            put=self._outlet.put,
            restore_unfinished=self._restore_unfinished,
        )

    def problem_counts(self) -> tuple[int, int]:
        """Return the number of problems for training and for evaluation."""
        return self._counts

    def _load(self, update: WeightUpdate) -> None:
        self._answering.load(update)

    def generate(self, prompts: tuple[Prompt, ...]) -> GenerationReport:
        """Answer this worker's prompts, and return when all are answered."""
        self._wake()
        answering = self._answering
        began, before = time.perf_counter(), answering.drawn
        self._outlet.begin(prompts)
        answering.answer(prompt for prompt in prompts if prompt.worker == self._rank)
        return GenerationReport(answering.drawn - before, time.perf_counter() - began)

    def try_alone(self, prompt: Prompt) -> None:
        """Answer a prompt and discard the result, to test whether this process survives."""
        self._wake()
        self._answering.try_alone(prompt._replace(worker=self._rank, version=0, begun=False))

    def put_again(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        """Send the answers of the current step in these slots to the reward workers again.

        Returns:
            The slots that this worker had answered.
        """
        return self._outlet.put_again(slots)

    def generate_forever(self) -> None:
        """Answer prompts from the runner, and load weights from the actor, until the runner ends the stream."""
        self._outlet.streams = True
        self._answering.answer_forever(Inbox(self._answers, orders_key(self._rank)), self._receive, self._keep)
        self._outlet.streams = False

    def _keep(self, report: UnfinishedReport) -> None:
        """Send unfinished answers to the actors, for a checkpoint."""
        self._scored.put(report, key=UNFINISHED)

    def _restore_unfinished(self, position: int) -> UnfinishedGroup:
        """Return a checkpoint's unfinished answers to a training problem."""
        return self._scored.get(key=unfinished_key(position))
