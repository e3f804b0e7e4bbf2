"""`recipe: agent` learns what its shipped configs promise.

`RLINF_FRAMEWORKS_PYTHON` names an interpreter with pydantic-ai and rlinf, as the head of configs/agent_framework.yaml
says.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.integration.recipes.language.test_math_learns import metrics, train

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(3600)]

FRAMEWORKS = os.environ.get("RLINF_FRAMEWORKS_PYTHON")


@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_learns_to_search_twice(tmp_path: Path, seed: int) -> None:
    run = train(tmp_path, "agent_search", f"actor.seed={seed}", f"data.seed={seed}")

    rewards = metrics(run, "rollout/reward")
    assert rewards[0] < 0.3
    assert statistics.fmean(rewards[-5:]) >= 0.8


def test_without_the_search_it_is_left_to_guess(tmp_path: Path) -> None:
    run = train(tmp_path, "agent_search", "agent.tools=[]")

    assert statistics.fmean(metrics(run, "rollout/reward")[-5:]) < 0.4


@pytest.mark.skipif(not FRAMEWORKS, reason="RLINF_FRAMEWORKS_PYTHON names no interpreter with pydantic-ai")
def test_an_agent_of_a_framework_learns_through_its_endpoint(tmp_path: Path) -> None:
    run = train(tmp_path, "agent_framework", "runner.max_steps=20", "data.val_size=50")

    rewards, greedy = metrics(run, "rollout/reward"), metrics(run, "eval/pass@1")
    assert statistics.fmean(rewards[-5:]) >= statistics.fmean(rewards[:3]) + 0.2
    assert greedy[-1] >= greedy[0] + 0.2
    # It uses its calculator, and its own words are learned from in every turn.
    assert metrics(run, "agent/turns")[-1] > metrics(run, "agent/turns")[0]
