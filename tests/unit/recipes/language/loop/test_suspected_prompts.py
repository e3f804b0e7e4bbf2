"""Prompts that rollout workers died of: which are tried alone, and what is kept of those that are set aside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from recipes.language.loop.answer_recovery import SuspectedPrompts
from recipes.language.prompts.prompt_messages import Prompt
from rlinf_core.errors import WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.runners.recovery import Suspects
from tests.unit.recipes.language.prompts.test_prompt_plan import made

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
