"""What is done again after a death: calls, kept answers, prompts that workers died of, and whole runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.answer_group import AnswerGroup, GroupOutlet, Rollout
from recipes.language.answers.prompt_messages import Prompt
from recipes.language.data.problems import Problem
from recipes.language.loop.answer_recovery import Calls, SuspectedPrompts
from recipes.language.loop.group_accounts import Arrivals
from recipes.language.loop.reasoning_runner import ReasoningRunner
from rlinf_core import Channel
from rlinf_core.errors import WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.runners import events
from rlinf_core.runners.recovery import Suspects
from tests.unit.recipes.language.in_threads import LocalTrain
from tests.unit.recipes.language.loop.test_prompt_plan import made


class Call:
    def __init__(self, references: list[str], broken: set[str]) -> None:
        self.references = references
        self.observed = False
        self._broken = broken

    @property
    def failed(self) -> bool:
        return any(reference in self._broken for reference in self.references)


class Group:
    """Three workers; `broken` are the references of calls that fail."""

    world_size = 3

    def __init__(self) -> None:
        self.made: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []
        self.broken: set[str] = set()

    def execute_on(self, *ranks: int) -> View:
        return View(self, ranks)

    def score(self, *args: Any) -> Call:
        return self.execute_on(*range(self.world_size)).score(*args)


class View:
    def __init__(self, group: Group, ranks: tuple[int, ...]) -> None:
        self.group, self.ranks = group, ranks

    def score(self, *args: Any) -> Call:
        self.group.made.append((self.ranks, args))
        number = len(self.group.made)
        return Call([f"{number}:{rank}" for rank in self.ranks], self.group.broken)

    def handle(self, method: str, references: list[str]) -> Call:
        assert method == "score"
        return Call(references, self.group.broken)


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def calls(group: Group) -> Calls:
    return Calls(cast("Any", group), "score")


def references(begun: Any) -> list[list[str]]:
    return [call.references for call in begun]


def test_only_the_dead_are_called_again(calls: Calls, group: Group) -> None:
    (whole,) = calls.begin((1, 2))
    group.broken = {"1:1"}
    calls.drop_failed([1])
    assert whole.observed
    assert calls.missing == (1,)
    assert references(calls.begin((1, 2, 9))) == [["1:0"], ["2:1"], ["1:2"]]
    assert group.made == [((0, 1, 2), ((1, 2),)), ((1,), ((1, 2, 9),))]


def test_those_that_failed_for_the_dead_are_called_again_too(calls: Calls, group: Group) -> None:
    calls.begin((1,))
    group.broken = {"1:2"}
    calls.drop_failed([0])
    assert references(calls.begin((1,))) == [["2:0"], ["1:1"], ["3:2"]]
    # A second death, while the others still answer.
    calls.drop_failed([1])
    assert references(calls.begin((1,))) == [["2:0"], ["4:1"], ["3:2"]]


def test_a_group_that_died_as_a_whole_is_called_as_one(calls: Calls, group: Group) -> None:
    calls.begin((1,))
    calls.drop_failed([0, 1, 2])
    assert calls.missing == (0, 1, 2)
    assert references(calls.begin((1,))) == [["2:0", "2:1", "2:2"]]


def answers(slot: int, step: int, text: str = "4") -> AnswerGroup:
    asked = Prompt(slot, slot, step, 0, 1, 1.0)
    return AnswerGroup(asked, slot, Problem(prompt="2+2=", answer="4"), (Rollout((), text),))


def prompts(step: int) -> list[Prompt]:
    return [Prompt(0, 0, step, 0, 1, 1.0)]


def outlet(*, keeps: bool) -> tuple[GroupOutlet, Channel]:
    channel = Channel.create("answers", local=True)
    return GroupOutlet(channel, 1, keeps=keeps), channel


def test_answers_are_kept_for_all_rounds_of_a_step() -> None:
    kept, _ = outlet(keeps=True)
    kept.begin(prompts(1))
    kept.put([answers(0, 1), answers(1, 1)])
    kept.begin(prompts(1))
    kept.put([answers(2, 1)])
    assert kept.put_again({0, 2, 5}) == (0, 2)
    kept.begin(prompts(2))
    assert kept.put_again({0, 1, 2}) == ()


def test_answers_of_evaluations_are_kept_for_one_round() -> None:
    kept, channel = outlet(keeps=True)
    for text in ("4", "5"):
        kept.begin(prompts(0))
        kept.put([answers(0, 0, text)])
        assert kept.put_again({0, 1}) == (0,)
        assert [channel.get(key="0") for _ in range(2)] == [[answers(0, 0, text)]] * 2
    kept.begin(prompts(0))
    assert kept.put_again({0}) == ()


@pytest.mark.parametrize(("keeps", "streams"), [(False, False), (True, True)])
def test_nothing_is_kept_without_restarts_or_an_end(keeps: bool, streams: bool) -> None:
    kept, channel = outlet(keeps=keeps)
    kept.streams = streams
    kept.begin(prompts(1))
    kept.put([answers(0, 1)])
    assert kept.put_again({0}) == ()
    assert channel.get(key="answers" if streams else "0") == [answers(0, 1)]


PROMPTS = [Prompt(slot, 5 + slot, 2, 0, 4, 1.0) for slot in range(3)]


class Record:
    def __init__(self) -> None:
        self.suspects: Suspects[Prompt] = Suspects()
        self.kept: list[tuple[Any, ...]] = []

    def set_aside(self, *what: Any) -> None:
        self.kept.append(what)


@pytest.fixture
def record() -> Record:
    return Record()


def suspects_of(record: Record) -> SuspectedPrompts:
    """Return the prompts of an attempt, with six problems."""
    suspects = SuspectedPrompts(cast("Any", record), SimpleNamespace(reshuffles=False, seed=0))
    suspects.problems = 6
    return suspects


def test_only_the_prompt_that_kills_alone_is_set_aside(record: Record) -> None:
    suspects = suspects_of(record)
    for reason in ("first", "second"):
        assert not suspects.due
        suspects.died_of(PROMPTS, reason)
    suspects.try_each(lambda prompt: "third" if prompt.slot == 1 else "")
    assert record.kept == [("prompt", "0", 2, ["first", "second", "third"])]
    assert (suspects.count, suspects.due) == (1, False)
    assert [prompt.set_aside for prompt in suspects.marked(PROMPTS)] == [False, True, False]
    # Its problem comes again in the next epoch, at another place of the order.
    assert suspects.marked([PROMPTS[0]._replace(position=12)])[0].set_aside


def test_deaths_of_earlier_attempts_count(record: Record) -> None:
    tried: list[int] = []
    for _ in range(2):
        suspects = suspects_of(record)
        plan = made(max_staleness=1)
        plan.due(range(1, 3), 0)
        dead = WorkerGroupError("RolloutGroup", "generate_forever", {1: WorkerDiedError("RolloutGroup:1")}, 2)
        suspects.died_with(dead, "RolloutGroup", plan)
    suspects_of(record).try_each(lambda prompt: tried.append(prompt.position) or "")
    # Of six prompts, those of the worker that died.
    assert tried == [1, 3, 5]


def test_death_of_another_worker_suspects_no_prompt(record: Record) -> None:
    suspects = suspects_of(record)
    plan = made(max_staleness=1)
    plan.due(range(1, 3), 0)
    for _ in range(2):
        suspects.died_with(WorkerDiedError("ActorGroup:0"), "RolloutGroup", plan)
    assert not suspects.due


# Twenty groups, in four steps; a checkpoint after each of them, while answers of two later steps are under way.
AHEAD = (
    "runner.max_staleness=2",
    "runner.save_interval=1",
    "runner.max_steps=4",
    "rollout.sampling_params.max_new_tokens=16",
    "rollout.sampling_params.min_new_tokens=12",
    "runner.seq_length=48",
)
MOMENTS = range(1, 21)
EVERY_DAY = (4, 11, 17)

# The prompts that the actor learned from, one for each answer, by step; of a step that was repeated, the last time.
Trained = dict[int, Counter[tuple[int, ...]]]
# Those of a run that nothing happened to, made once.
UNDISTURBED: Trained = {}


def prompts_of(batches: dict[int, RolloutBatch]) -> Trained:
    result: Trained = {}
    for step, batch in batches.items():
        sequences, sizes = batch.tokens.split(batch.lengths.tolist()), batch.prompt_lengths.tolist()
        result[step] = Counter(tuple(sequence[:size].tolist()) for sequence, size in zip(sequences, sizes, strict=True))
    return result


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Have a worker die when that many scored groups have come to the runner."""
    running: list[ReasoningRunner] = []
    start, take = ReasoningRunner.start_workers, Arrivals.take
    left = [moment]

    def started(runner: ReasoningRunner) -> None:
        running.append(runner)
        start(runner)

    def taken(arrivals: Arrivals, groups: Sequence[Any]) -> None:
        take(arrivals, groups)
        left[0] -= len(groups)
        if left[0] <= 0 < left[0] + len(groups):
            group: Any = running[-1].groups[("rollout", "reward", "actor")[moment % 3]]
            group.die()

    monkeypatch.setattr(ReasoningRunner, "start_workers", started)
    monkeypatch.setattr(Arrivals, "take", taken)


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(
    "moment", [moment if moment in EVERY_DAY else pytest.param(moment, marks=pytest.mark.nightly) for moment in MOMENTS]
)
def test_a_run_that_is_killed_trains_on_each_prompt_once(
    train: LocalTrain, batches: dict[int, RolloutBatch], monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    if not UNDISTURBED:
        train(*AHEAD, rollouts=2)
        UNDISTURBED.update(prompts_of(batches))
        batches.clear()
    kill_at(monkeypatch, moment)
    run = train(*AHEAD, rollouts=2)
    assert [type(event) for event in run.events].count(events.RunRestarted) == 1
    assert [record.step for record in run.metrics] == [1, 2, 3, 4]
    assert prompts_of(batches) == UNDISTURBED
    # What the run told of the checkpoint is all that had been set aside by then, and was not trained on.
    for event in run.events:
        if isinstance(event, events.ItemsResumed):
            named = [name for names in event.fates.values() for name in names]
            assert len(set(named)) == len(named) == min(2, 4 - event.step) * 5
