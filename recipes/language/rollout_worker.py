"""The workers that answer prompts."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from recipes.language.config import LanguageConfig
from recipes.language.data.load import load_problems
from recipes.language.data.problems import Problem, training_order
from recipes.language.data.prompts import PromptEncoder
from recipes.language.engines.registry import make_engine
from recipes.language.layout import LanguageLayout
from recipes.language.models import make_tokenizer, stop_token_ids
from recipes.language.sequences import Request, SamplingParams, Sequence
from recipes.language.weights import WeightUpdate
from recipes.training.weight_sync import receivers_of
from rlinf_core import Worker

_TRAIN, _EVAL = "train", "eval"


class AnswerGroup(NamedTuple):
    """The answers to one prompt, on their way to be scored.

    Attributes:
        slot: number of the group in its batch.
        problem: number of the problem in its set.
        question: the problem.
        texts: the answers without the tokens that end them; empty for a prompt that was skipped.
        answers: the sequences.
        pieces: text of each token, by answer; empty where nobody is to read them.
    """

    slot: int
    problem: int
    question: Problem
    texts: tuple[str, ...]
    answers: tuple[Sequence, ...]
    pieces: tuple[tuple[str, ...], ...] = ()


class GenerationReport(NamedTuple):
    """Figures of a worker's share of a generation.

    Attributes:
        tokens: drawn.
        seconds: that the engine worked.
        version: of the weights at its end.
    """

    tokens: int
    seconds: float
    version: int


class LanguageRolloutWorker(Worker):
    """Answers prompts by an engine, each several times, and hands the answers to the reward workers."""

    config_section = "rollout"

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self._config = config
        self._version = -1

    def init_worker(self, layout: LanguageLayout) -> None:
        """Start the engine; its weights come with the first `sync_model_from_actor`."""
        config = self._config
        torch.set_num_threads(config.rollout.threads)
        self._layout = layout
        self._tokenizer = make_tokenizer(config.actor)
        self._stops = stop_token_ids(self._tokenizer, config.actor.model.model_path)
        self._engine = make_engine(config, self._tokenizer, self._stops, self.torch_device)
        data = config.data
        self._encoder = PromptEncoder(
            self._tokenizer,
            apply_chat_template=data.apply_chat_template,
            system_prompt=data.system_prompt,
            few_shot=data.few_shot,
            max_prompt_length=data.max_prompt_length,
        )
        self._problems = {
            _TRAIN: load_problems(data, evaluation=False),
            _EVAL: load_problems(data, evaluation=True),
        }
        self._answers = self.connect_channel(layout.answers)

    def problem_counts(self) -> tuple[int, int]:
        """Return how many problems there are for training and for evaluation."""
        return len(self._problems[_TRAIN]), len(self._problems[_EVAL])

    def sync_model_from_actor(self) -> int:
        """Load the weights that the actor sends, and return their version.

        Raises:
            MismatchError: what the engine holds then is not what was sent.
        """
        layout, source = self._layout, self._rank % self._layout.actors
        groups = [(self._config.rollout.group_name, receivers_of(source, layout.actors, layout.rollouts))]
        update: WeightUpdate = self.broadcast(None, groups, (self._config.actor.group_name, source))
        update.apply(self._engine)
        self._version = update.version
        return update.version

    def generate(self, step: int, start: int, slots: tuple[int, ...], shown: int = 0) -> GenerationReport:
        """Answer this worker's share of a batch of training problems.

        Args:
            step: the training step; draws depend on it.
            start: how many problems training has taken before those of `slots`.
            slots: numbers, in the batch, of the groups to be made; shared out by position.
            shown: of how many groups, of all workers, people may read answers token by token.
        """
        data, params = self._config.data, self._config.rollout.sampling_params
        problems = self._problems[_TRAIN]
        taken = training_order(len(problems), start, len(slots), seed=data.seed, shuffle=data.shuffle)
        mine = [(slot, taken[index]) for index, slot in enumerate(slots) if index % self._world_size == self._rank]
        sampling = self._params(params.temperature, step)
        return self._answer(_TRAIN, mine, self._config.algorithm.group_size, sampling, frozenset(slots[:shown]))

    def evaluate(self, samples: int, temperature: float, first: int, count: int) -> GenerationReport:
        """Answer this worker's share of evaluation problems `first` to `first + count`, each `samples` times."""
        mine = [(index, first + index) for index in range(count) if index % self._world_size == self._rank]
        return self._answer(_EVAL, mine, samples, self._params(temperature, 0))

    def _params(self, temperature: float, step: int) -> SamplingParams:
        given = self._config.rollout.sampling_params
        return SamplingParams(
            temperature=temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            max_new_tokens=given.max_new_tokens,
            min_new_tokens=given.min_new_tokens,
            stop_token_ids=tuple(given.stop_token_ids),
            stop=tuple(given.stop),
            seed=(self._config.actor.seed << 32) + step,
        )

    def _answer(
        self,
        which: str,
        mine: list[tuple[int, int]],
        group_size: int,
        params: SamplingParams,
        shown: frozenset[int] = frozenset(),
    ) -> GenerationReport:
        """Answer problems and put each group into the channel when it is whole."""

        began, drawn = time.perf_counter(), 0
        questions: dict[str, tuple[int, int, Problem]] = {}
        for slot, index in mine:
            problem = self._problems[which][index]
            tokens = self._encoder.encode(problem)
            if not tokens:
                self._put(AnswerGroup(slot, index, problem, (), ()))
                continue
            questions[str(slot)] = slot, index, problem
            self._engine.submit(Request(request_id=str(slot), prompt=tokens, params=params, group_size=group_size))
        found: dict[str, list[Sequence]] = {}
        for answer in self._engine.results():
            drawn += len(answer.tokens)
            group = found.setdefault(answer.request_id, [])
            group.append(answer)
            if len(group) == group_size:
                slot, index, problem = questions[answer.request_id]
                ordered = tuple(sorted(found.pop(answer.request_id), key=lambda each: each.sample))
                texts = tuple(self._encoder.text(self._without_stop(each)) for each in ordered)
                pieces = tuple(self._encoder.pieces(each.tokens) for each in ordered) if slot in shown else ()
                self._put(AnswerGroup(slot, index, problem, texts, ordered, pieces))
        return GenerationReport(drawn, time.perf_counter() - began, self._version)

    def _without_stop(self, answer: Sequence) -> tuple[int, ...]:
        tokens = answer.tokens
        return tokens[:-1] if tokens and tokens[-1] in self._stops else tokens

    def _put(self, group: AnswerGroup) -> None:
        self._answers.put(group, key=str(group.slot % self._layout.rewards))

    def _close(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()
