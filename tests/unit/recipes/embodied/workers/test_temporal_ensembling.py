"""Temporal ensembling: the mean over all chunks that reach a step, and who can be evaluated by it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.registry import make_model
from recipes.embodied.workers.rollout_worker import TemporalEnsemble, greedy_actions
from rlinf_cli.job.job_file import load_with_lint

N, HORIZON, LOOKS = 2, 7, 9


@pytest.mark.parametrize(("executed", "coefficient"), [(1, 0.01), (1, -0.5), (3, 0.3), (7, 0.3)])
def test_actions_are_weighted_means_of_all_predictions(executed: int, coefficient: float) -> None:
    """The second environment begins a new episode at the fifth look: earlier chunks are not of it."""
    chunks = torch.randn(LOOKS, N, HORIZON, 3, generator=torch.Generator().manual_seed(0))
    ensemble = TemporalEnsemble(executed, coefficient)
    for look, chunk in enumerate(chunks):
        mean = ensemble.add(chunk, None if look == 0 else np.array([False, look == 4]))
        for env in range(N):
            first = 4 if env == 1 and look >= 4 else 0
            for ahead in range(executed):
                # (look - of) chunks later the step is so many actions further in the chunk of look `of`.
                places = [(of, ahead + executed * (look - of)) for of in range(first, look + 1)]
                said = [chunks[of, env, place] for of, place in places if place < HORIZON]
                weights = [math.exp(-coefficient * index) for index in range(len(said))]
                expected = sum(weight * action for weight, action in zip(weights, said, strict=True)) / sum(weights)
                torch.testing.assert_close(mean[env, ahead], expected, atol=1e-5, rtol=1e-5)


def test_a_flow_policy_acts_by_its_chunks_mean() -> None:
    model = {"model_type": "flow_policy", "hidden_dim": 16, "num_action_chunks": 4, "options": {"action_horizon": 9}}
    policy: Any = make_model(policy_model(model), EnvSpec(5, 2))
    executed, generator = 4, np.random.default_rng(0)
    ensemble = TemporalEnsemble(executed)
    seen = [policy.prepare({"states": generator.normal(size=(3, 5)).astype(np.float32)}) for _ in range(2)]
    np.testing.assert_array_equal(
        greedy_actions(policy, seen[0], executed), policy.to_env(policy.act(seen[0], greedy=True).actions)
    )
    first, second = (policy.predicted(item) for item in seen)
    np.testing.assert_allclose(greedy_actions(policy, seen[0], executed, ensemble), policy.to_env(first), atol=1e-6)
    newer = math.exp(-0.01)
    expected = (first[:, executed : 2 * executed] + newer * second[:, :executed]) / (1 + newer)
    np.testing.assert_allclose(greedy_actions(policy, seen[1], executed, ensemble), policy.to_env(expected), atol=1e-6)


def reported(*overrides: str) -> list[str]:
    overrides = ("env.eval.inference.chunking=ensemble", *overrides)
    return [diagnostic.message for diagnostic in load_with_lint("laptop", overrides, environ={}).diagnostics]


def test_predictions_need_a_mean() -> None:
    flow = "actor.model={model_type: flow_policy, options: {action_horizon: 9}}"
    assert reported(flow) == []
    assert any("predicts more than is carried out" in message for message in reported())
    whole = "actor.model={model_type: flow_policy, num_action_chunks: 5, options: {action_horizon: 5}}"
    assert any("all 5 actions of a chunk are carried out" in message for message in reported(whole))
