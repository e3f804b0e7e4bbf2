"""Flow matching: what is drawn is what is evaluated, noise leaves the distribution, and it learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.flow.flow_matching import FlowSde, OneStepSde
from recipes.embodied.models.registry import make_model
from rlinf_core.errors import ConfigError

N, CHUNK, ACTIONS, STEPS = 5, 2, 3, 4
STATES = EnvSpec(6, ACTIONS)
IMAGES = EnvSpec(6, ACTIONS, cameras={"main": (36, 36, 3)})


def config(**model: Any) -> EmbodiedModelConfig:
    inputs = {"model_type": "flow_policy", "hidden_dim": 16, "num_action_chunks": CHUNK, "options": {"steps": STEPS}}
    return policy_model({**inputs, **model})


def make(spec: EnvSpec = STATES, **model: Any) -> BasePolicy:
    torch.manual_seed(0)
    return make_model(config(**model), spec)


def observed(spec: EnvSpec) -> dict[str, Any]:
    random = np.random.default_rng(0)
    seen = {"states": random.normal(size=(N, 6)).astype(np.float32)}
    return seen if not spec.cameras else {**seen, "images.main": random.integers(0, 255, (N, 36, 36, 3), np.uint8)}


def test_velocities_are_computed_once_to_act(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make()
    inputs = policy.prepare(observed(STATES))
    counted: list[int] = []
    computed = policy._flow  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(policy, "_flow", lambda *arguments: (counted.append(1), computed(*arguments))[1])
    for greedy in (False, True):
        counted.clear()
        output = policy.act(inputs, greedy=greedy)
        assert len(counted) == STEPS
        assert (output.logprobs is None) == greedy


def test_more_actions_than_predicted_are_refused() -> None:
    with pytest.raises(ConfigError, match="predicts 1 actions, but `num_action_chunks` is 2"):
        make(options={"action_horizon": 1})


def test_demonstrations_are_learned_for_the_whole_horizon() -> None:
    policy = make(options={"action_horizon": 7})
    inputs = policy.prepare(observed(STATES))
    assert policy.imitation_losses(inputs, torch.zeros(N, policy.horizon, ACTIONS)).shape == (N, 7, ACTIONS)


def test_one_noisy_step_leaves_the_others_as_they_are() -> None:
    """Between the first noise and the step that was drawn the flow is the ordinary one, and so it is after it."""
    sde = OneStepSde(5, 0.8)

    def velocity(x: Tensor, time: Tensor) -> Tensor:
        return x.sin() + time[:, None]

    record, logprobs = sde.draw(velocity, torch.zeros(400, 2), torch.Generator().manual_seed(0))
    before, after, index, sample = record
    chosen = index[:, 0]
    assert [int((chosen == step).sum()) > 50 for step in range(5)] == [True] * 5
    t, sigma = index / 5, 0.8 * (1 - index / 5).sqrt()
    v = before.sin() + t
    mean = before + (v + sigma**2 / 2 * -(before - t * v) / (1 - t)) / 5
    torch.testing.assert_close(logprobs[0], Normal(mean, sigma * (1 / 5) ** 0.5).log_prob(after))
    torch.testing.assert_close(sde.entropies(record)[0], Normal(mean, sigma * (1 / 5) ** 0.5).entropy())
    x = after
    for step in range(1, 5):
        x = torch.where(index < step, x + velocity(x, torch.full((400,), step / 5)) / 5, x)
    torch.testing.assert_close(x, sample)


def test_log_probabilities_are_those_of_normal_distributions() -> None:
    sde, chain = FlowSde(3, 0.7), torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(0))

    def velocity(x: Tensor, time: Tensor) -> Tensor:
        return x.sin() + time[:, None]

    wanted: list[Tensor] = []
    for index in range(3):
        t, x = index / 3, chain[index]
        v, sigma = x.sin() + t, 0.7 * (1 - t) ** 0.5
        score = -(x - t * v) / (1 - t)
        mean = x + (v + sigma**2 / 2 * score) / 3
        wanted.append(Normal(mean, sigma * (1 / 3) ** 0.5).log_prob(chain[index + 1]))
    torch.testing.assert_close(sde.logprobs(velocity, chain), torch.stack(wanted))
    torch.testing.assert_close(sde.entropies(chain)[1, 0, 0], Normal(0.0, 0.7 * (2 / 9) ** 0.5).entropy())


def test_noise_leaves_the_distribution_as_it_is() -> None:
    """Samples of mean 2 and deviation 0.5, whose velocity is known: the flow with noise gets there as well."""
    mean, deviation = 2.0, 0.5

    def velocity(x: Tensor, time: Tensor) -> Tensor:
        t = time[:, None]
        variance = (1 - t) ** 2 + (t * deviation) ** 2
        return mean + (t * deviation**2 - (1 - t)) / variance * (x - t * mean)

    generator = torch.Generator().manual_seed(0)
    for sde in (FlowSde(100, 0.0001), FlowSde(100, 1.0), OneStepSde(100, 1.0)):
        ends = sde.draw(velocity, torch.zeros(20_000, 1), generator)[0][-1]
        assert float(ends.mean()) == pytest.approx(mean, abs=0.03)
        assert float(ends.std()) == pytest.approx(deviation, abs=0.03)


def test_it_learns_two_ways_to_act() -> None:
    """Half of the demonstrations go left and half right: a mean of both would be neither."""
    policy = make(EnvSpec(6, 1), num_action_chunks=1, hidden_dim=32, options={"steps": 10, "noise": 0.3})
    inputs = {"states": torch.zeros(256, 6)}
    wanted = policy.from_env(np.where(np.arange(256) % 2, 0.8, -0.8).astype(np.float32).reshape(256, 1, 1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(300):
        loss = policy.imitation_losses(inputs, wanted).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    result = policy.to_env(policy.act(inputs).actions).flatten()
    assert np.median(np.abs(np.abs(result) - 0.8)) < 0.15
    assert 0.3 < (result > 0).mean() < 0.7


def test_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match="continuous actions"):
        make(EnvSpec(4, 1, num_choices=2))
