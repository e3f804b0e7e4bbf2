"""Which calls are made again after a death, with groups that only note their calls; and the answers that are kept."""

from __future__ import annotations

from typing import Any, cast

import pytest

from recipes.language.answers.answer_group import AnswerGroup, GroupOutlet, Rollout
from recipes.language.data.problems import Problem
from recipes.language.loop.answer_recovery import Calls
from recipes.language.prompts.prompt_messages import Prompt
from rlinf_core import Channel


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
    return AnswerGroup(
        Prompt(slot, slot, step, 0, 1, 1.0), slot, Problem(prompt="2+2=", answer="4"), (Rollout((), text),)
    )


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
