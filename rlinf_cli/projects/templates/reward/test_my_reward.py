"""The function gives the rewards that it promises, also as reward workers call it, and its job file is valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.language import Item, Scorer
from rlinf_core import load_job

from my_reward import score


@pytest.mark.parametrize(("text", "reward"), [("7", 1.0), ("8", 0.5), ("12", 0.0), ("seven", 0.0)])
def test_reward_falls_with_distance(text: str, reward: float) -> None:
    assert score(text, "7")["reward"] == reward


def test_reward_workers_can_call_it() -> None:
    with Scorer("my_reward:score") as scorer:
        scored = scorer.score(Item(text="8", answer="7"))
    assert (scored.failure, scored.reward) == ("", 0.5)


def test_job_file_is_valid() -> None:
    job = load_job(str(Path(__file__).with_name("my_reward.yaml")))
    assert job.ok, job.diagnostics
