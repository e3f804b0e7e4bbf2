"""How the groups of a batch are dealt to actors and to optimizer steps."""

from __future__ import annotations

import random

import pytest

from recipes.language.prompts.prompt_messages import GroupReport, assign


def group(slot: int, tokens: int) -> GroupReport:
    return GroupReport(
        slot=slot,
        step=1,
        problem=slot,
        source="sums",
        difficulty="",
        tokens=tokens,
        rewards=(0.0,),
        lengths=(2,),
        truncated=0,
        failures={},
        parts={},
        oldest=0,
        version_sum=0,
    )


@pytest.mark.parametrize("minibatches", [1, 2, 5])
def test_optimizer_steps_use_equal_groups_on_any_actor_count(minibatches: int) -> None:
    rng = random.Random(0)
    groups = [group(slot, rng.randrange(1, 90)) for slot in range(40)]
    alone = assign(groups, 1, minibatches)[0]
    assert sorted(slot for part in alone for slot in part) == list(range(40))
    for actors in (2, 3, 8):
        dealt = assign(groups, actors, minibatches)
        together = [sorted(slot for rank in dealt for slot in rank[number]) for number in range(minibatches)]
        assert together == [list(part) for part in alone]
        assert dealt == assign(groups[::-1], actors, minibatches)


def test_tokens_are_balanced_between_steps_and_actors() -> None:
    rng = random.Random(1)
    groups = [group(slot, rng.randrange(1, 90)) for slot in range(64)]
    dealt = assign(groups, 4, 2)
    loads = [[sum(groups[slot].tokens for slot in part) for part in rank] for rank in dealt]
    steps = [sum(column) for column in zip(*loads, strict=True)]
    assert max(steps) - min(steps) < 90
    for column in zip(*loads, strict=True):
        assert max(column) - min(column) < 90


def test_fewer_groups_than_optimizer_steps_leave_some_without() -> None:
    assert assign([group(3, 5)], 2, 2) == (((3,), ()), ((), ()))
