"""Programs that try to earn a reward without solving anything, and honest ones whose tests use more than numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from recipes.language.rewards.scoring import Item, Scorer
from recipes.language.sandbox import sandbox
from rlinf_core import ConfigError

PROGRAMS: Final = Path(__file__).parents[4] / "data" / "answers" / "programs.jsonl"


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    try:
        sandbox.check()
    except ConfigError as error:
        pytest.skip(str(error))
    with Scorer("code", timeout=3.0, settings={"memory": 256 << 20}) as made:
        yield made


def programs(kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in PROGRAMS.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["kind"] == kind]


def rewards(scorer: Scorer, rows: list[dict[str, Any]]) -> dict[str, float | str]:
    items = [Item(text=f"```python\n{row['program']}\n```", answer=row["tests"]) for row in rows]
    scores = scorer.score_all(items)
    return {row["name"]: score.failure or score.reward for row, score in zip(rows, scores, strict=True)}


def test_no_forgery_earns_a_reward(scorer: Scorer) -> None:
    forged = programs("forged")
    assert len(forged) >= 40
    assert {name: reward for name, reward in rewards(scorer, forged).items() if reward != 0} == {}


def test_honest_programs_pass_tests_of_objects_and_functions(scorer: Scorer) -> None:
    assert {name: reward for name, reward in rewards(scorer, programs("honest")).items() if reward != 1} == {}
