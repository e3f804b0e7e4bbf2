"""The workers that answer prompts."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from recipes.language.answering import AnswerGroup, Answering
from recipes.language.buffered import UnfinishedGroup, UnfinishedReport
from recipes.language.config import LanguageConfig
from recipes.language.data.load import load_problems
from recipes.language.data.prompts import PromptEncoder
from recipes.language.engines.base import Engine
from recipes.language.engines.registry import make_engine
from recipes.language.layout import LanguageLayout
from recipes.language.loop.generation import ANSWERS, UNFINISHED, orders_key, unfinished_key
from recipes.language.loop.inbox import Inbox
from recipes.language.loop.prompts import Prompt
from recipes.language.models import make_tokenizer, stop_token_ids
from recipes.language.weights import IncomingWeights
from recipes.training.weight_sync import receivers_of
from rlinf_core import Worker


class GenerationReport(NamedTuple):
    """Figures of a worker's share of a generation.

    Attributes:
        tokens: drawn.
        seconds: that the engine worked.
    """

    tokens: int
    seconds: float


class LanguageRolloutWorker(Worker):
    """Answers prompts by an engine, each several times, and hands the answers to the reward workers."""

    config_section = "rollout"

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self._config = config
        # Whether the group never stops, so that any reward worker may take any group.
        self._streams = False
        self._rests = False

    def init_worker(self, layout: LanguageLayout) -> None:
        """Start the engine; its weights come with the first `sync_model_from_actor`."""
        config = self._config
        torch.set_num_threads(config.rollout.threads)
        self._layout = layout
        self._tokenizer = make_tokenizer(config.actor)
        stops = stop_token_ids(self._tokenizer, config.actor.model.model_path)
        self._engine = self.make_engine(stops)
        data = config.data
        encoder = PromptEncoder(
            self._tokenizer,
            apply_chat_template=data.apply_chat_template,
            system_prompt=data.system_prompt,
            few_shot=data.few_shot,
            max_prompt_length=data.max_prompt_length,
        )
        training, evaluation = load_problems(data, evaluation=False), load_problems(data, evaluation=True)
        self._counts = len(training), len(evaluation)
        self._answering = Answering(
            config,
            self._engine,
            encoder,
            stops,
            training=training,
            evaluation=evaluation,
            put=self._put,
            take_up=self._take_up,
        )
        self._answers = self.connect_channel(layout.answers)
        self._scored = self.connect_channel(layout.scored)

    def make_engine(self, stops: tuple[int, ...]) -> Engine:
        """Return the engine that answers; a subclass may wrap it.

        Args:
            stops: tokens that end every answer.
        """
        return make_engine(self._config, self._tokenizer, stops, self.torch_device)

    def problem_counts(self) -> tuple[int, int]:
        """Return how many problems there are for training and for evaluation."""
        return self._counts

    def sync_model_from_actor(self) -> int:
        """Load the weights that the actor sends, and return their version.

        Raises:
            RLinfError: what the engine holds then is not what was sent.
        """
        self._wake()
        self._answering.load(self._receive().wait())
        return self._answering.version

    def _receive(self) -> IncomingWeights:
        """Begin to receive the weights that the actor sends."""
        layout, source = self._layout, self._rank % self._layout.actors
        groups = [(self._config.rollout.group_name, receivers_of(source, layout.actors, layout.rollouts))]
        actor = (self._config.actor.group_name, source)
        return IncomingWeights(lambda: self.broadcast(None, groups, actor, async_op=True))

    def generate(self, prompts: tuple[Prompt, ...]) -> GenerationReport:
        """Answer those of the prompts that are this worker's, and return when all of them are answered."""
        self._wake()
        answering = self._answering
        began, before = time.perf_counter(), answering.drawn
        answering.answer(each for each in prompts if each.worker == self._rank)
        return GenerationReport(answering.drawn - before, time.perf_counter() - began)

    def rest(self, weights_follow: bool) -> None:
        """Give up memory of the accelerator until the next call: all, where new weights come before the next answers.

        With a LoRA adapter nothing but the adapter comes, and the weights stay.
        """
        whole = weights_follow and self._config.actor.model.adapter() is None
        self._engine.sleep(2 if whole else 1)
        self._rests = True

    def _wake(self) -> None:
        if self._rests:
            self._engine.wake()
            self._rests = False

    def generate_forever(self) -> None:
        """Answer prompts as the runner sends them, and load weights as the actor does, until the runner ends it."""
        self._streams = True
        self._answering.answer_forever(Inbox(self._answers, orders_key(self._rank)), self._receive, self._keep)
        self._streams = False

    def _keep(self, report: UnfinishedReport) -> None:
        """Hand the answers that are under way over to the actors, for a checkpoint."""
        self._scored.put(report, key=UNFINISHED)

    def _take_up(self, position: int) -> UnfinishedGroup:
        """Return what a checkpoint has of the answers to a training problem."""
        return self._scored.get(key=unfinished_key(position))

    def _put(self, groups: list[AnswerGroup]) -> None:
        """Hand groups to the reward workers, in one message to each: a message costs more than most scores."""
        count = self._layout.rewards
        shares: list[list[AnswerGroup]] = [[] for _ in range(count)]
        for number, group in enumerate(groups):
            shares[(number if self._streams else group.prompt.slot) % count].append(group)
        for rank, share in enumerate(shares):
            if share:
                self._answers.put(share, key=ANSWERS if self._streams else str(rank))

    def _close(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()
