"""Tracking of prompts in an engine, which receives requests and weights while it samples."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from recipes.language.answers.answer_batch import UnfinishedGroup, UnfinishedReport
from recipes.language.answers.answer_group import AnswerGroup, Rollout
from recipes.language.answers.prompt_messages import Inbox, KeepUnfinished, NewWeights, Prompt
from recipes.language.answers.sequences import Begun, Request, SamplingParams, Sequence, sampling_params, undrawn
from recipes.language.config.language_config import LanguageConfig
from recipes.language.data.problems import Problem, ProblemSet, PromptEncoder, problem_number, prompt_tokens
from recipes.language.engines.engine import Engine, EngineAnswerError
from recipes.language.weights.weight_transfer import IncomingWeights, WeightUpdate
from rlinf_core.worker.timer import timer


class EngineStream:
    """A loop that serves requests and loads new weights between two tokens.

    Weights arrive while tokens are sampled. A request waits for the weights that it needs.

    Args:
        engine: the engine.
        begin: submits requests to the engine.
        collect: receives finished answers.
        receive: starts receiving weights; None: weights never change, and serve all requests.
        load: loads weights into the engine.
        partial: whether unfinished answers continue under new weights, or are finished under the old weights first.
        version: the version of the engine's weights; -1: none yet.

    Attributes:
        seconds: the seconds of the engine's work.
    """

    def __init__(
        self,
        engine: Engine,
        begin: Callable[[list[Any]], object],
        collect: Callable[[Iterable[Sequence]], object],
        receive: Callable[[], IncomingWeights] | None = None,
        load: Callable[[WeightUpdate], None] = lambda update: None,
        *,
        partial: bool = True,
        version: int = -1,
    ) -> None:
        self._engine = engine
        self._begin = begin
        self._collect = collect
        self._receive = receive
        self._load = load
        self._partial = partial
        self._version = version
        self._announced = 0
        self._receiving: IncomingWeights | None = None
        self.seconds = 0.0

    def run(
        self, orders: Inbox, take: Callable[[Any, list[Any]], Iterable[Any]] = lambda order, waiting: order
    ) -> None:
        """Generate until None has arrived and all earlier requests are done.

        Args:
            orders: the inbox of requests, `NewWeights`, and None at the end.
            take: returns the requests in a message that is neither `NewWeights` nor None, given the waiting ones.
        """
        engine, waiting, ended = self._engine, list[Any](), False
        while not ended or self._weights_come or waiting or engine.unfinished:
            idle = not (ended or self._weights_come or engine.unfinished)
            for order in [orders.wait()] if idle else orders.poll():
                if order is None:
                    ended = True
                elif isinstance(order, NewWeights):
                    self._announced += 1
                else:
                    waiting += take(order, waiting)
            self._advance_weights()
            self._begin([one for one in waiting if self._is_ready(one)])
            waiting = [one for one in waiting if not self._is_ready(one)]
            began = time.perf_counter()
            with timer("engine/step", engine.unfinished) if engine.unfinished else nullcontext():
                drawn = engine.step()
            self._collect(drawn)
            self.seconds += time.perf_counter() - began

    def _is_ready(self, request: Any) -> bool:
        return self._receive is None or request.version <= self._version

    @property
    def _weights_come(self) -> bool:
        return bool(self._announced or self._receiving)

    def _advance_weights(self) -> None:
        """Receive the next weights, and load them when they have arrived; wait for them if the engine is idle."""
        if self._receive is not None and self._announced and self._receiving is None:
            self._announced -= 1
            self._receiving = self._receive()
        if self._receiving is not None and (self._receiving.done() or not self._engine.unfinished):
            update = self._receiving.wait()
            self._collect(self._engine.pause("freeze" if self._partial else "drain"))
            self._load(update)
            self._engine.resume()
            self._version, self._receiving = update.version, None


LOGGER = logging.getLogger("rlinf")
_SET_ASIDE = "quarantined: its processes died repeatedly"


class _Open(NamedTuple):
    """A prompt with answers still missing.

    Attributes:
        number, problem: the number of the problem, and the problem.
        answers: the answers so far.
        again: the samples that are generated again after a failure of the engine.
    """

    prompt: Prompt
    number: int
    problem: Problem
    answers: list[Sequence]
    again: set[int]


class Answering:
    """A tracker that answers prompts with an engine, and emits each group when it is complete.

    Args:
        config: the configuration of the job.
        engine: the engine that generates.
        encoder: the encoder of the problems' prompts.
        stops: tokens that end answers, which are left out of texts.
        training, evaluation: the problems.
        put: receives groups completed at the same time; a prompt that is too long gives a group without answers.
        restore_unfinished: returns a checkpoint's unfinished answers to a training problem, by its position.

    Attributes:
        version: the version of the engine's weights; -1: none yet.
        drawn: the number of tokens sampled so far.
    """

    def __init__(
        self,
        config: LanguageConfig,
        engine: Engine,
        encoder: PromptEncoder,
        stops: tuple[int, ...],
        *,
        training: ProblemSet,
        evaluation: ProblemSet,
        put: Callable[[list[AnswerGroup]], None],
        restore_unfinished: Callable[[int], UnfinishedGroup] | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._encoder = encoder
        self._stops = frozenset(stops)
        self._problems: Mapping[bool, ProblemSet] = {True: training, False: evaluation}
        self._put = put
        # Incomplete prompts, by request name.
        self._open: dict[str, _Open] = {}
        self._restore_unfinished = restore_unfinished
        # Unfinished answers from a checkpoint, by problem position.
        self._begun: dict[int, UnfinishedGroup] = {}
        self.version = -1
        self.drawn = self._refused = self._failures = 0

    def load(self, update: WeightUpdate) -> None:
        """Load weights into the engine.

        Raises:
            RLinfError: the loaded weights differ from the sent ones.
        """
        update.apply(self._engine)
        self.version = update.version

    def answer(self, prompts: Iterable[Prompt]) -> None:
        """Answer prompts, and return when all of them are answered.

        Raises:
            EngineAnswerError: the engine finished with fewer answers than requested.
        """
        self._begin(map(self._accepted, prompts))
        while self._engine.unfinished:
            with timer("engine/step", self._engine.unfinished):
                drawn = self._engine.step()
            self._collect(drawn)
        for group in self._open.values():
            raise EngineAnswerError(
                f"the engine returned {len(group.answers)} of {group.prompt.answers} answers to a prompt",
                why=f"the engine is idle, but did not finish `{group.problem.prompt[:80]}`",
            )

    def try_alone(self, prompt: Prompt) -> None:
        """Answer a prompt whose result is discarded."""
        put, self._put = self._put, _drop
        try:
            self.answer((prompt,))
        finally:
            self._put = put

    def answer_forever(
        self,
        orders: Inbox,
        receive: Callable[[], IncomingWeights],
        keep: Callable[[UnfinishedReport], None] | None = None,
    ) -> None:
        """Answer prompts as they are ordered, and load new weights between tokens, until the end.

        Weights arrive while tokens are sampled. With `runner.partial_rollout`, unfinished answers continue under the
        new weights; without it, they are finished under the old weights first. A prompt waits for the weights that it
        needs.

        Args:
            orders: the orders from the runner.
            receive: starts receiving weights.
            keep: receives the unfinished answers for a checkpoint.
        """

        def take(order: tuple[Prompt, ...] | KeepUnfinished, waiting: list[Prompt]) -> Iterable[Prompt]:
            if not isinstance(order, KeepUnfinished):
                return map(self._accepted, order)
            if keep is not None:
                keep(self._unfinished(waiting))
            return ()

        partial, version = self._config.runner.partial_rollout, self.version
        stream = EngineStream(
            self._engine, self._begin, self._collect, receive, self.load, partial=partial, version=version
        )
        stream.run(orders, take)

    def _accepted(self, prompt: Prompt) -> Prompt:
        """Return a prompt, and restore its unfinished answers from a checkpoint, so that the next checkpoint has them,
        too.
        """
        if prompt.begun and self._restore_unfinished is not None:
            self._begun[prompt.position] = self._restore_unfinished(prompt.position)
        return prompt

    def _unfinished(self, waiting: Iterable[Prompt]) -> UnfinishedReport:
        """Return the unfinished answers to training problems; `waiting` are prompts not yet started."""
        # Leave out failed answers, which are requested again after a resume.
        drawn = {name: [answer for answer in group.answers if not answer.failed] for name, group in self._open.items()}
        for answer in self._engine.unfinished_answers():
            if answer.tokens:
                drawn[answer.request_id].append(answer)
        here = [(group.prompt, drawn[name]) for name, group in self._open.items() if group.prompt.trains]
        groups = [UnfinishedGroup(prompt.position, tuple(answers)) for prompt, answers in here if answers]
        positions = [prompt.position for prompt, _ in here] + [
            unfinished.position for unfinished in waiting if unfinished.trains
        ]
        return UnfinishedReport(tuple(positions), (*groups, *self._begun.values()))

    def _begin(self, prompts: Iterable[Prompt]) -> None:
        for prompt in prompts:
            self._submit(prompt)

    def _submit(self, prompt: Prompt) -> None:
        data, problems, index = self._config.data, self._problems[prompt.trains], prompt.position
        if prompt.trains:
            index = problem_number(len(problems), index, seed=data.seed, shuffle=data.reshuffles)
        problem = problems[index]
        new = self._config.rollout.sampling_params.max_new_tokens
        tokens, why = prompt_tokens(self._encoder, problem, new, self._engine.longest)
        if why:
            if not self._refused:
                LOGGER.warning("skipped prompt %d: %s; further ones are only counted", index, why)
            self._refused += 1
        if not tokens:
            self._put([AnswerGroup(prompt, index, problem)])
            return
        if prompt.set_aside:
            lost = partial(undrawn, tokens, (), finish_reason="aborted", failure=_SET_ASIDE)
            aside = tuple(Rollout((lost(sample=sample),)) for sample in range(prompt.answers))
            self._put([AnswerGroup(prompt, index, problem, aside)])
            return
        # Slots of training and evaluation may be equal.
        name = f"{'train' if prompt.trains else 'eval'}:{prompt.slot}"
        self._open[name] = _Open(prompt, index, problem, [], set())
        params = self._params(prompt)
        begun = self._begun.pop(prompt.position, None) if prompt.begun else None
        request = Request(request_id=name, prompt=tokens, params=params, group_size=prompt.answers)
        if begun is None or begun.answers[0].prompt != tokens:
            self._engine.submit(request)
        else:
            self._resubmit(request, begun)

    def _resubmit(self, request: Request, begun: UnfinishedGroup) -> None:
        """Submit a request with restored answers: finished ones are collected, the others continue."""
        there = {answer.sample: answer for answer in begun.answers if answer.sample < request.group_size}
        ended = [answer for answer in there.values() if answer.finish_reason != "aborted"]
        for sample in sorted(set(range(request.group_size)) - {answer.sample for answer in ended}):
            answer = there.get(sample)
            drawn = Begun()
            if answer and self._engine.continues and len(answer.tokens) < request.params.max_new_tokens:
                drawn = Begun(tokens=answer.tokens, logprobs=answer.logprobs, versions=answer.versions)
            self._engine.submit(replace(request, group_size=1, sample_offset=sample, begun=drawn))
        self._collect(replace(answer, request_id=request.request_id) for answer in ended)

    def _ask_again(self, prompt: Prompt, answer: Sequence) -> None:
        """Request an answer again, from the start, that the engine failed to give."""
        if not self._failures:
            LOGGER.warning("an engine failed to answer, and is asked again: %s; see `failed/engine`", answer.failure)
        self._failures += 1
        params = self._params(prompt)
        request = Request(
            request_id=answer.request_id, prompt=answer.prompt, params=params, sample_offset=answer.sample
        )
        self._engine.submit(request)

    def _params(self, prompt: Prompt) -> SamplingParams:
        seed = prompt.seed(self._config.actor.seed, len(self._problems[prompt.trains]))
        return sampling_params(self._config, prompt.temperature, seed)

    def _collect(self, answers: Iterable[Sequence]) -> None:
        """Collect answers, and emit complete groups."""
        whole: list[AnswerGroup] = []
        for answer in answers:
            self.drawn += len(answer.tokens)
            group = self._open[answer.request_id]
            if answer.failed and answer.sample not in group.again:
                group.again.add(answer.sample)
                self._ask_again(group.prompt, answer)
                continue
            group.answers.append(answer)
            if len(group.answers) == group.prompt.answers:
                del self._open[answer.request_id]
                whole.append(self._whole(group))
        if whole:
            self._put(whole)

    def _whole(self, group: _Open) -> AnswerGroup:
        answers = sorted(group.answers, key=lambda answer: answer.sample)
        # Answers to one prompt are often equal, so decode each once.
        alike = dict.fromkeys(answer.tokens for answer in answers)
        texts = {tokens: self._encoder.text(tokens, self._stops) for tokens in alike}
        shown = [self._encoder.pieces(answer.tokens) if group.prompt.shown else () for answer in answers]
        pairs = zip(answers, shown, strict=True)
        rollouts = tuple(Rollout((answer,), texts[answer.tokens], pieces) for answer, pieces in pairs)
        return AnswerGroup(group.prompt, group.number, group.problem, rollouts)


def _drop(groups: list[AnswerGroup]) -> None:
    """Discard groups."""
