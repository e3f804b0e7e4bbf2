"""Flow matching: what is drawn is what is evaluated, noise leaves the distribution, and it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.flow.flow_matching import FlowSde
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model
from rlinf_core.errors import ConfigError

N, CHUNK, ACTIONS, STEPS = 5, 2, 3, 4
STATES = EnvSpec(6, ACTIONS)
IMAGES = EnvSpec(6, ACTIONS, cameras={"main": (36, 36, 3)})


def config(**model: Any) -> EmbodiedModelConfig:
    given = {"model_type": "flow_policy", "hidden_dim": 16, "num_action_chunks": CHUNK, "options": {"steps": STEPS}}
    return EmbodiedModelConfig.model_validate({**given, **model})


def make(spec: EnvSpec = STATES, **model: Any) -> BasePolicy:
    torch.manual_seed(0)
    return make_model(config(**model), spec)


def observed(spec: EnvSpec) -> dict[str, Any]:
    random = np.random.default_rng(0)
    seen = {"states": random.normal(size=(N, 6)).astype(np.float32)}
    return seen if not spec.cameras else {**seen, "images.main": random.integers(0, 255, (N, 36, 36, 3), np.uint8)}


@pytest.mark.parametrize("spec", [STATES, IMAGES], ids=["states", "images"])
@pytest.mark.parametrize("greedy", [False, True])
def test_what_is_drawn_is_what_is_evaluated(spec: EnvSpec, greedy: bool) -> None:
    policy = make(spec)
    inputs = policy.prepare(observed(spec))
    output = policy.act(inputs, greedy=greedy)
    assert output.actions.shape == output.logprobs.shape == (N, CHUNK, (STEPS + 1) * ACTIONS)
    again = policy(inputs, output.actions)
    torch.testing.assert_close(again.logprobs, output.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(again.values, output.values, atol=1e-5, rtol=0)
    assert again.entropy.shape == output.logprobs.shape
    assert policy.to_env(output.actions).shape == (N, CHUNK, ACTIONS)
    np.testing.assert_array_equal(policy.to_env(output.actions), output.actions[..., -ACTIONS:].numpy())


def test_log_probabilities_are_those_of_normal_distributions() -> None:
    sde, chain = FlowSde(3, 0.7), torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(0))

    def velocity(x: Tensor, time: Tensor) -> Tensor:
        return x.sin() + time[:, None]

    wanted = [Normal(0.0, 1.0).log_prob(chain[0])]
    for index in range(3):
        t, x = index / 3, chain[index]
        v, sigma = x.sin() + t, 0.7 * (1 - t) ** 0.5
        score = -(x - t * v) / (1 - t)
        mean = x + (v + sigma**2 / 2 * score) / 3
        wanted.append(Normal(mean, sigma * (1 / 3) ** 0.5).log_prob(chain[index + 1]))
    torch.testing.assert_close(sde.logprobs(velocity, chain), torch.stack(wanted))
    torch.testing.assert_close(sde.entropies(chain[0])[2, 0, 0], Normal(0.0, 0.7 * (2 / 9) ** 0.5).entropy())


def test_noise_leaves_the_distribution_as_it_is() -> None:
    """Samples of mean 2 and deviation 0.5, whose velocity is known: the flow with noise gets there as well."""
    mean, deviation = 2.0, 0.5

    def velocity(x: Tensor, time: Tensor) -> Tensor:
        t = time[:, None]
        variance = (1 - t) ** 2 + (t * deviation) ** 2
        return mean + (t * deviation**2 - (1 - t)) / variance * (x - t * mean)

    generator = torch.Generator().manual_seed(0)
    for noise in (0.0001, 1.0):
        ends = FlowSde(100, noise).draw(velocity, torch.zeros(20_000, 1), generator)[-1]
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
    found = policy.to_env(policy.act(inputs).actions).flatten()
    assert np.median(np.abs(np.abs(found) - 0.8)) < 0.15
    assert 0.3 < (found > 0).mean() < 0.7


def test_it_comes_back_from_its_folder(tmp_path: Path) -> None:
    policy = make()
    save_policy(policy, config(), STATES, tmp_path / "policy")
    torch.manual_seed(1)
    again = make_model(config(model_path=str(tmp_path / "policy")), STATES)
    inputs = policy.prepare(observed(STATES))
    assert torch.equal(policy.act(inputs, greedy=True).actions, again.act(inputs, greedy=True).actions)


def test_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match="continuous actions"):
        make(EnvSpec(4, 1, num_choices=2))
