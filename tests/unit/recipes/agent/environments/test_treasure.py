from __future__ import annotations

import asyncio
import random
import re
from collections import deque

import pytest

from recipes.agent.environments.text_environment import TextStep, Treasure

MOVES = ("north", "south", "west", "east")


async def _said(seed: int, *texts: str) -> tuple[str, list[TextStep]]:
    game = Treasure()
    first = await game.reset(seed)
    return first, [await game.step(text) for text in texts]


def said(seed: int, *texts: str) -> tuple[str, list[TextStep]]:
    return asyncio.run(_said(seed, *texts))


def room(text: str) -> str:
    return re.findall(r"(\d) \(", text)[-1]


def solution(seed: int) -> list[str]:
    """Return the shortest way to the treasure, found by walking."""
    first, _ = said(seed)
    goal = re.findall(r"find room (\d)", first)[0]
    ways = deque([([], room(first))])
    seen = {room(first)}
    while True:
        way, here = ways.popleft()
        if here == goal:
            return way
        for move in MOVES:
            last = said(seed, *way, move)[1][-1].text
            if "(" in last and room(last) not in seen:
                seen.add(room(last))
                ways.append(([*way, move], room(last)))


@pytest.mark.parametrize("seed", range(5))
def test_the_treasure_can_be_found_and_taken(seed: int) -> None:
    way = solution(seed)
    _, steps = said(seed, *way, "Take\n")
    assert [step.reward for step in steps] == [0.0] * len(way) + [1.0]
    assert [step.done for step in steps] == [False] * len(way) + [True]


def test_a_seed_is_a_game() -> None:
    assert said(3) == said(3)
    assert len({said(seed)[0] for seed in range(20)}) == 20


def test_what_is_no_move_costs_one_and_there_are_twelve() -> None:
    _, steps = said(0, *["dance"] * 12)
    assert steps[0] == TextStep("say north, south, west, east or take. ")
    assert [step.done for step in steps] == [False] * 11 + [True]


def test_nothing_is_taken_elsewhere() -> None:
    assert said(0, "take")[1] == [TextStep("it is not here. ")]


def test_skilled_examples_take_the_treasure_others_wander() -> None:
    async def played(seed: int, skill: float) -> tuple[float, int]:
        game, chance, gained, missed = Treasure(), random.Random(seed), 0.0, 0
        await game.reset(seed)
        for _ in range(12):
            step = await game.step(game.example(chance, skill))
            assert not step.text.startswith(("say", "there is a wall"))
            gained, missed = gained + step.reward, missed + step.text.startswith("it is not here")
            if step.done:
                break
        return gained, missed

    well = [asyncio.run(played(seed, 1.0)) for seed in range(40)]
    badly = [asyncio.run(played(seed, 0.0)) for seed in range(40)]
    assert sum(missed for _, missed in well) == 0
    assert sum(missed for _, missed in badly) > 0
    assert sum(gained for gained, _ in well) > sum(gained for gained, _ in badly) > 0
