"""Real-time chunking: its weights and guidance against formulas, and what is carried out while a policy computes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.env_config import InferenceConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.flow.flow_matching import FlowSde
from recipes.embodied.models.flow.real_time_chunking import guided, overlap_weights
from recipes.embodied.models.registry import make_model
from recipes.embodied.workers.delayed_inference import DelayedInference
from rlinf_cli.lint.load import load_with_lint
from rlinf_core import ConfigError

N, EXECUTED, HORIZON, DELAY = 3, 4, 9, 2


def policy_of(**options: Any) -> Any:
    torch.manual_seed(0)
    config = {"model_type": "flow_policy", "hidden_dim": 16, "num_action_chunks": EXECUTED}
    config["options"] = {"action_horizon": HORIZON, **options}
    policy: Any = make_model(EmbodiedModelConfig.model_validate(config), EnvSpec(5, 2))
    for weight in policy.velocity.parameters():
        torch.nn.init.normal_(weight, 0, 0.3)
    return policy


def inference(policy: Any, **config: Any) -> DelayedInference:
    return DelayedInference(policy, InferenceConfig.model_validate({"delay": DELAY, **config}), policy.shape[0])


def inputs(policy: Any, seed: int) -> Any:
    states = np.random.default_rng(seed).normal(size=(N, 5)).astype(np.float32)
    return policy.prepare({"states": states})


def test_weights_are_those_of_the_paper() -> None:
    weights = overlap_weights(16, 5, 3)
    assert torch.equal(weights[:3], torch.ones(3))
    assert torch.equal(weights[11:], torch.zeros(5))
    for index in range(3, 11):
        share = (16 - 5 - index) / (16 - 5 - 3 + 1)
        assert math.isclose(float(weights[index]), share * (math.exp(share) - 1) / (math.e - 1), abs_tol=1e-6)


def test_guidance_is_a_product_with_the_jacobian() -> None:
    generator = torch.Generator().manual_seed(1)
    x, target, matrix = (torch.randn(shape, generator=generator) for shape in ((1, 4, 2), (1, 4, 2), (8, 8)))
    weights, at = torch.tensor([[1.0, 0.5, 0.25, 0.0]]), 0.3

    def velocity(points: Tensor, time: Tensor) -> Tensor:
        return (points.flatten(1) @ matrix).view_as(points) * time.view(-1, 1, 1)

    moving = velocity(x, torch.tensor([at]))
    error = ((target - x - (1 - at) * moving) * weights[..., None]).flatten()
    # Of an end x + (1 - t) t x M the transposed derivative is I + (1 - t) t M.
    pull = (torch.eye(8) + (1 - at) * at * matrix) @ error
    spread = (1 - at) ** 2 / (at**2 + (1 - at) ** 2)
    strength = min(5.0, (1 - at) / (at * spread))
    wanted = moving + strength * pull.view_as(x)
    assert torch.allclose(guided(velocity, target, weights, 5.0)(x, torch.tensor([at])), wanted, atol=1e-5)
    first = guided(velocity, target, weights, 5.0)(x, torch.tensor([0.0]))
    assert torch.allclose(first, 5 * (target - x) * weights[..., None], atol=1e-5)


def test_a_guided_flow_keeps_the_prefix_and_frees_the_end() -> None:
    def velocity(points: Tensor, time: Tensor) -> Tensor:
        return torch.ones_like(points)

    weights = overlap_weights(HORIZON, EXECUTED, DELAY)[None]
    end = FlowSde(10, 0.5).follow(
        guided(velocity, -torch.ones(1, HORIZON, 2), weights, 5.0), torch.zeros(1, HORIZON, 2)
    )
    assert torch.allclose(end[:, HORIZON - EXECUTED :], torch.ones(1, EXECUTED, 2), atol=1e-5)
    assert (end[:, 1:] >= end[:, :-1] - 1e-6).all()
    assert end[0, 0, 0] < 0.5


@pytest.mark.parametrize("chunking", ["switch", "real_time"])
def test_delayed_steps_carry_out_the_chunk_before(chunking: str) -> None:
    policy = policy_of()
    acting = inference(policy, chunking=chunking)
    before, after = inputs(policy, 1), inputs(policy, 2)
    chunk = policy.act(before, greedy=True).actions
    assert np.allclose(acting.act(before), policy.to_env(chunk))
    actions = acting.act(after)
    following = policy.act(after, greedy=True).actions
    if chunking == "real_time":
        weights = overlap_weights(HORIZON, EXECUTED, DELAY).expand(N, -1)
        apart = (following - chunk.roll(-EXECUTED, dims=1)).abs()[:, :DELAY].mean()
        following = policy.continued(after, chunk.roll(-EXECUTED, dims=1), weights, 5.0)
        assert (following - chunk.roll(-EXECUTED, dims=1)).abs()[:, :DELAY].mean() < 0.5 * apart
    assert actions.shape == (N, EXECUTED, 2)
    assert np.allclose(actions[:, :DELAY], chunk[:, EXECUTED : EXECUTED + DELAY].numpy(), atol=1e-6)
    assert np.allclose(actions[:, DELAY:], following[:, DELAY:EXECUTED].numpy(), atol=1e-5)


@pytest.mark.parametrize("chunking", ["switch", "real_time"])
def test_an_episode_begins_with_its_own_chunk(chunking: str) -> None:
    policy = policy_of()
    acting = inference(policy, chunking=chunking)
    acting.act(inputs(policy, 1))
    begun = np.array([False, True, False])
    actions = acting.act(inputs(policy, 2), begun)
    fresh = policy.to_env(policy.act(inputs(policy, 2), greedy=True).actions)
    assert np.allclose(actions[1], fresh[1], atol=1e-5)
    assert not np.allclose(actions[0], fresh[0], atol=1e-3)


def test_an_arm_that_waits_stands_still_first() -> None:
    policy = policy_of()
    acting = inference(policy, chunking="wait")
    assert acting.act(inputs(policy, 1)).shape == (N, EXECUTED, 2)
    actions = acting.act(inputs(policy, 2))
    assert actions.shape == (N, DELAY + EXECUTED, 2)
    assert (actions[:, :DELAY] == 0).all()
    assert np.allclose(actions[:, DELAY:], policy.to_env(policy.act(inputs(policy, 2), greedy=True).actions))


def test_a_delay_beyond_the_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)a delay of 5 steps.*at most 4"):
        inference(policy_of(), chunking="real_time", delay=5)


MODEL = "actor.model={model_type: flow_policy, num_action_chunks: 4, options: {action_horizon: 9}}"
REAL_TIME = "inference={chunking: real_time, delay: 2}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((MODEL, f"env.train.{REAL_TIME}"), "unknown key `inference` in `env.train`"),
        ((f"env.eval.{REAL_TIME}",), "`mlp_policy` is none"),
        ((MODEL, "env.eval.inference={chunking: switch, delay: 5}"), "a delay of 5 steps is too long"),
        ((MODEL, f"env.eval.{REAL_TIME}"), None),
    ],
)
def test_validate_refuses_delays_that_cannot_be(overrides: tuple[str, ...], words: str | None) -> None:
    job = load_with_lint("laptop", overrides)
    messages = [diagnostic.message for diagnostic in job.diagnostics if "inference" in diagnostic.path]
    assert len(messages) == (words is not None)
    assert words is None or words in messages[0]
