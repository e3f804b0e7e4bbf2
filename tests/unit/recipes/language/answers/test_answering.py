"""Prompts on their way through an engine that draws one token of each answer at a time, without processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import Tensor

from recipes.language.answers.answer_batch import UnfinishedGroup
from recipes.language.answers.answer_group import AnswerGroup
from recipes.language.answers.prompt_messages import KeepUnfinished, NewWeights, Prompt
from recipes.language.answers.sequences import FinishReason, Request, Sequence
from recipes.language.data.problems import Problem
from recipes.language.engines.engine import Engine, EngineAnswerError, EngineStats, PauseMode
from recipes.language.weights.weight_transfer import WeightHeader, WeightUpdate
from recipes.language.workers.request_tracker import Answering
from tests.unit.recipes.language.tiny import Script, job_config, sequence


class SteppingEngine(Engine):
    """Draws the prompt's first token so often as it says, as answers of its length."""

    continues = True

    def __init__(self) -> None:
        self.version = -1
        self.rows: list[tuple[Request, int, list[int]]] = []
        self.paused = False

    def submit(self, request: Request) -> None:
        first = request.sample_offset
        begun = request.begun.versions
        self.rows += [(request, sample, [*begun]) for sample in range(first, first + request.group_size)]

    def step(self) -> list[Sequence]:
        assert not self.paused
        return self._drawn()

    def _drawn(self) -> list[Sequence]:
        for _, _, versions in self.rows:
            versions.append(self.version)
        ended = [row for row in self.rows if len(row[2]) == row[0].prompt[0]]
        self.rows = [row for row in self.rows if row not in ended]
        return [self._sequence(*row, "stop") for row in ended]

    def _sequence(self, request: Request, sample: int, versions: list[int], reason: FinishReason) -> Sequence:
        options: Any = {"request_id": request.request_id, "versions": tuple(versions), "finish_reason": reason}
        return sequence([5] * len(versions), request.prompt, sample, **options)

    def unfinished_answers(self) -> list[Sequence]:
        return [self._sequence(*row, "aborted") for row in self.rows]

    @property
    def unfinished(self) -> int:
        return len(self.rows)

    def pause(self, mode: PauseMode) -> list[Sequence]:
        self.paused = True
        done: list[Sequence] = []
        while mode == "drain" and self.rows:
            done += self._drawn()
        return done

    def resume(self) -> None:
        self.paused = False

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, *, adapter_only: bool = False) -> str:
        self.version = version
        return "same"

    def sleep(self, level: int = 1) -> None: ...

    def wake(self) -> None: ...

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def stop(self) -> None: ...


class Encoder:
    """Prompts are numbers; 0 is too long."""

    def encode(self, problem: Problem) -> tuple[int, ...] | None:
        return (int(problem.prompt),) if int(problem.prompt) else None

    def text(self, tokens: tuple[int, ...], stops: frozenset[int]) -> str:
        return "x" * len(tokens)

    def pieces(self, tokens: tuple[int, ...]) -> tuple[str, ...]:
        return tuple("x" for _ in tokens)


class Weights:
    """Weights that arrive some looks after they were announced."""

    def __init__(self, delay: int = 0) -> None:
        self.delay = delay
        self.versions = iter(range(100))

    def __call__(self) -> Any:
        left, version = self.delay, next(self.versions)

        def done() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        def wait() -> WeightUpdate:
            return WeightUpdate(WeightHeader(version, ()), iter(()), lambda: "same")

        return SimpleNamespace(done=done, wait=wait)


def prompt(slot: int, length: int, version: int = 0, answers: int = 2, step: int = 1) -> Prompt:
    # The place in the order of problems is the length of the answer.
    return Prompt(slot, length, step, 0, answers, 1.0, version)


def made(*overrides: str, restore_unfinished: Any = None) -> tuple[Answering, list[AnswerGroup]]:
    config, encoder = job_config("data.shuffle=false", *overrides), cast("Any", Encoder())
    put: list[AnswerGroup] = []
    problems: Any = [Problem(prompt=str(number), answer="") for number in range(50)]
    engine = SteppingEngine()
    sets: Any = {"training": problems, "evaluation": problems}
    return Answering(config, engine, encoder, (), **sets, put=put.extend, restore_unfinished=restore_unfinished), put


def versions(group: AnswerGroup) -> tuple[int, ...]:
    assert len({answer.versions for answer in group.answers}) == 1
    return group.answers[0].versions


def test_answers_under_way_go_on_under_new_weights() -> None:
    answering, put = made("runner.max_staleness=2")
    script = Script((0, NewWeights(0)), (0, (prompt(0, 6), prompt(1, 2))), (2, NewWeights(1)), (9, None))
    answering.answer_forever(script, Weights())
    assert {item.prompt.slot: versions(item) for item in put} == {1: (0, 0), 0: (0, 0, 0, 1, 1, 1)}


def test_answers_end_under_their_weights_without_partial_rollout() -> None:
    answering, put = made("runner.max_staleness=2", "runner.partial_rollout=false")
    script = Script(
        (0, NewWeights(0)),
        (0, (prompt(0, 6),)),
        (3, NewWeights(1)),
        (3, (prompt(1, 2),)),
        (6, (prompt(2, 1),)),
        (9, None),
    )
    answering.answer_forever(script, Weights(2))
    assert {item.prompt.slot: versions(item) for item in put} == {0: (0,) * 6, 1: (0, 0), 2: (1,)}


def test_prompt_waits_for_its_weights_while_others_continue() -> None:
    answering, put = made("runner.max_staleness=1")
    script = Script((0, NewWeights(0)), (0, (prompt(0, 8), prompt(1, 1, version=1))), (2, NewWeights(1)), (3, None))
    answering.answer_forever(script, Weights(3))
    results = {item.prompt.slot: versions(item) for item in put}
    assert results[1] == (1,)
    assert set(results[0]) == {0, 1}


@pytest.mark.parametrize("ending", [0, 1, 30])
def test_the_end_comes_when_everything_is_answered_once(ending: int) -> None:
    answering, put = made("runner.max_staleness=1")
    prompts = tuple(prompt(slot, slot % 5, answers=3) for slot in range(12))
    script = Script((0, NewWeights(0)), (0, prompts), (0, NewWeights(1)), (0, NewWeights(2)), (ending, None))
    answering.answer_forever(script, Weights(1))
    assert sorted(item.prompt.slot for item in put) == list(range(12))
    assert all(len(item.answers) == (3 if item.prompt.slot % 5 else 0) for item in put)
    assert [[answer.sample for answer in item.answers] for item in put if item.answers] == [[0, 1, 2]] * 9
    assert answering.version == 2


def test_problems_of_evaluation_have_slots_of_their_own() -> None:
    answering, put = made()
    answering.load(Weights()().wait())
    answering.answer([prompt(0, 3), prompt(0, 4, step=0)])
    assert [(item.prompt.trains, len(item.answers[0].tokens)) for item in put] == [(True, 3), (False, 4)]


def test_a_problem_that_a_batch_asks_twice_is_drawn_anew() -> None:
    answering, _ = made()
    answering.load(Weights()().wait())
    submitted: list[Request] = []
    cast("Any", answering)._engine.submit = submitted.append
    answering._begin([prompt(0, 3), prompt(1, 53), prompt(2, 3, step=2), prompt(0, 3, step=0)])
    assert {request.prompt for request in submitted} == {(3,)}
    assert len({request.params.seed for request in submitted}) == 4


def test_a_prompt_without_room_in_the_engine_is_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answering, put = made("rollout.sampling_params.max_new_tokens=8")
    monkeypatch.setattr(SteppingEngine, "longest", 9)
    answering.answer([prompt(0, 3)])
    monkeypatch.setattr(SteppingEngine, "longest", 8)
    answering.answer([prompt(1, 3), prompt(2, 4)])
    assert [len(group.answers) for group in put] == [2, 0, 0]
    assert caplog.text.count("1 tokens and `max_new_tokens` 8 exceed the engine's limit of 8") == 1


def test_a_worker_that_gets_no_prompt_is_done() -> None:
    answering, put = made()
    answering.answer([])
    assert (put, answering.drawn) == ([], 0)


def test_an_engine_that_leaves_answers_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answering, put = made()
    engine = cast("Any", answering)._engine
    whole = engine.step
    monkeypatch.setattr(engine, "step", lambda: [item for item in whole() if item.sample != 1])
    with pytest.raises(EngineAnswerError, match="returned 1 of 2 answers"):
        answering.answer([prompt(0, 3)])
    assert put == []


class FailingEngine(SteppingEngine):
    """Fails the first answer of each group at once, as often as it says."""

    def __init__(self, tries: int) -> None:
        super().__init__()
        self.tries = tries

    def _drawn(self) -> list[Sequence]:
        lost = [row for row in self.rows if row[1] == 0 and self.tries > 0]
        self.tries -= len(lost)
        self.rows = [row for row in self.rows if row not in lost]
        return [replace(self._sequence(*row, "aborted"), failure="lost") for row in lost] + super()._drawn()


@pytest.mark.parametrize(("tries", "failures"), [(1, ["", ""]), (2, ["lost", ""]), (9, ["lost", ""])])
def test_an_answer_that_an_engine_fails_is_drawn_again(tries: int, failures: list[str]) -> None:
    answering, put = made()
    cast("Any", answering)._engine = FailingEngine(tries)
    answering.load(Weights()().wait())
    answering.answer([prompt(0, 3)])
    (group,) = put
    assert [answer.failure for answer in group.answers] == failures
    assert [len(answer.tokens) for answer in group.answers] == [0 if failure else 3 for failure in failures]


def test_a_failed_answer_is_not_kept_for_a_checkpoint() -> None:
    answering, put = made("runner.max_staleness=2")
    cast("Any", answering)._engine = FailingEngine(2)
    kept: list[Any] = []
    orders = (0, NewWeights(0)), (0, (prompt(0, 8),)), (4, KeepUnfinished(1)), (12, None)
    answering.answer_forever(Script(*orders), Weights(), kept.append)
    (report,) = kept
    assert [answer.sample for group in report.groups for answer in group.answers] == [1]
    assert [answer.failed for answer in put[0].answers] == [True, False]


def kept_of(*orders: tuple[int, Any], restore_unfinished: Any = None) -> tuple[list[Any], list[AnswerGroup]]:
    """Return what a worker hands over for checkpoints, and the groups that it puts out."""
    answering, put = made("runner.max_staleness=2", restore_unfinished=restore_unfinished)
    kept: list[Any] = []
    answering.answer_forever(Script(*orders), Weights(), kept.append)
    return kept, put


def test_answers_under_way_are_handed_over_and_go_on_from_there() -> None:
    prompts = (prompt(0, 6), prompt(1, 2), prompt(2, 1, version=1), prompt(3, 0))
    (report,), whole = kept_of((0, NewWeights(0)), (0, prompts), (3, KeepUnfinished(1)), (4, NewWeights(1)), (9, None))
    # The second is answered by then, the third waits for its weights, the fourth is too long.
    assert report.oldest == {6: 0, 1: None}
    ((position, answers),) = report.groups
    assert (position, [answer.versions for answer in answers]) == (6, [(0, 0, 0, 0)] * 2)
    assert len(whole) == 4
    again = prompt(7, 6)._replace(begun=True)
    orders = (0, NewWeights(0)), (0, NewWeights(1)), (0, (again,)), (9, None)
    _, put = kept_of(*orders, restore_unfinished={6: report.groups[0]}.get)
    (group,) = put
    assert group.prompt.slot == 7
    assert [answer.sample for answer in group.answers] == [0, 1]
    assert {answer.request_id for answer in group.answers} == {"train:7"}
    assert versions(group) == (0, 0, 0, 0, 1, 1)


def test_of_a_group_only_what_has_not_ended_goes_on() -> None:
    ended = sequence([1] * 4, (6,), 1, versions=(1,) * 4)
    aborted = sequence([1] * 5, (6,), 2, versions=(1,) * 5, finish_reason="aborted")
    begun = UnfinishedGroup(6, (ended, aborted))
    orders = (0, NewWeights(0)), (0, (prompt(0, 6, answers=3)._replace(begun=True),)), (9, None)
    _, put = kept_of(*orders, restore_unfinished={6: begun}.get)
    (group,) = put
    assert [answer.versions for answer in group.answers] == [(0,) * 6, (1,) * 4, (1, 1, 1, 1, 1, 0)]


def test_waiting_answers_are_kept_by_the_next_checkpoint() -> None:
    begun = UnfinishedGroup(6, (sequence((5,), (6,), finish_reason="aborted"),))
    waits = prompt(0, 6, version=1)._replace(begun=True)
    orders = (0, NewWeights(0)), (0, (waits,)), (1, KeepUnfinished(1)), (2, NewWeights(1)), (9, None)
    (report,), put = kept_of(*orders, restore_unfinished={6: begun}.get)
    assert report.groups == (begun,)
    assert report.oldest == {6: 0}
    assert len(put) == 1


@pytest.mark.parametrize(("continues", "asked"), [(False, (6,)), (True, (7,))])
def test_what_cannot_be_gone_on_with_is_begun_anew(
    monkeypatch: pytest.MonkeyPatch, continues: bool, asked: tuple[int, ...]
) -> None:
    """An engine that cannot, or a prompt that is another one by now."""
    monkeypatch.setattr(SteppingEngine, "continues", continues)
    begun = UnfinishedGroup(6, (sequence((5,), asked, finish_reason="aborted"),))
    orders = (0, NewWeights(0)), (0, NewWeights(1)), (0, (prompt(0, 6)._replace(begun=True),)), (9, None)
    _, put = kept_of(*orders, restore_unfinished={6: begun}.get)
    assert [len(answer.tokens) for answer in put[0].answers] == [6, 6]


def test_prompt_that_is_set_aside_has_failed_answers() -> None:
    answering, put = made()
    answering.answer([prompt(0, 6)._replace(set_aside=True), prompt(1, 2)])
    aside, drawn = put
    assert [(answer.sample, answer.failed, answer.tokens) for answer in aside.answers] == [(0, True, ()), (1, True, ())]
    assert (len(drawn.answers), answering.drawn) == (2, 4)


def test_prompt_that_is_tried_alone_is_answered_for_nobody() -> None:
    answering, put = made()
    answering.try_alone(prompt(0, 6))
    assert (answering.drawn, put) == (12, [])
    answering.answer([prompt(1, 2)])
    assert [group.prompt.slot for group in put] == [1]
