"""A frozen flow whose noise is chosen: what it does with the noise, what is saved, and what cannot be steered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.normalization import Normalization, Statistics
from recipes.embodied.models.policy_folder import save_policy
from recipes.embodied.models.registry import make_model
from recipes.embodied.models.small.steered_policy import SteeredPolicy
from rlinf_core.errors import ConfigError
from tests.unit.recipes.embodied.models.lerobot import fake_lerobot

N, CHUNK, HORIZON, ACTIONS, STEPS = 5, 2, 3, 2, 4
SPEC = EnvSpec(6, ACTIONS)
FLOW: dict[str, Any] = {
    "model_type": "flow_policy",
    "hidden_dim": 16,
    "num_action_chunks": CHUNK,
    "options": {"steps": STEPS, "action_horizon": HORIZON},
}


def observed() -> dict[str, Any]:
    return {"states": np.random.default_rng(0).normal(3, 2, (N, 6)).astype(np.float32)}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.manual_seed(0)
    config = policy_model(FLOW)
    policy = make_model(config, SPEC)
    rows = np.random.default_rng(1).normal(3, 2, (20, 6))
    policy.normalization = Normalization("mean_std", Statistics.of(rows), Statistics.of(rows[:, :ACTIONS]))
    save_policy(policy, config, SPEC, tmp_path / "flow")
    return str(tmp_path / "flow")


def steered(folder: str, **options: Any) -> SteeredPolicy:
    torch.manual_seed(1)
    section = {"model_type": "steered_policy", "model_path": folder, "num_action_chunks": CHUNK, "hidden_dim": 16}
    policy = make_model(policy_model({**section, "options": options}), SPEC)
    assert isinstance(policy, SteeredPolicy)
    return policy


@pytest.mark.parametrize("repeats", [False, True])
def test_actions_are_the_flow_from_the_chosen_noise(folder: str, repeats: bool) -> None:
    policy = steered(folder, noise_bound=2.5, repeats_noise=repeats)
    inputs = policy.prepare(observed())
    output = policy.act(inputs)
    size = ACTIONS if repeats else HORIZON * ACTIONS
    assert output.actions.shape == (N, 1, size + CHUNK * ACTIONS)
    noise = output.actions[:, 0, :size]
    assert noise.abs().max() < 1
    # The flow of the frozen policy by itself, step by step.
    flow: Any = make_model(policy_model({**FLOW, "model_path": folder}), SPEC)
    seen = flow.prepare(observed())
    chunk = 2.5 * noise.view(N, -1, ACTIONS).expand(N, HORIZON, ACTIONS)
    with torch.no_grad():
        velocity = flow.velocity_of(flow.see(seen), seen)
        for step in range(STEPS):
            chunk = chunk + velocity(chunk, torch.full((N,), step / STEPS)) / STEPS
    expected = flow.normalization.actions_of(chunk[:, :CHUNK].numpy())
    np.testing.assert_allclose(policy.to_env(output.actions), expected, atol=1e-5)
    assert output.logprobs is not None
    judged = policy(inputs, output.actions)
    torch.testing.assert_close(judged.logprobs, output.logprobs, atol=1e-3, rtol=1e-3)


def test_only_what_chooses_the_noise_is_trained(folder: str) -> None:
    policy = steered(folder)
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    layers = ("layers.0", "layers.2", "mean", "log_std")
    assert trained == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    assert policy.recorded(policy.prepare(observed())).keys() == {"states"}
    assert not policy.train().frozen.training


def test_random_noise_is_that_of_the_frozen_policys_training(folder: str) -> None:
    policy = steered(folder, noise_bound=1.5)
    states = np.zeros((4000, 6), np.float32)
    drawn = policy.random(policy.prepare({"states": states})).actions[:, 0, : policy.action_size] * 1.5
    normal = torch.randn(100_000).clamp(-1.5, 1.5)
    assert abs(float(drawn.std()) - float(normal.std())) < 0.02
    assert float(drawn.abs().max()) <= 1.5


def test_a_saved_policy_needs_no_other_folder(folder: str, tmp_path: Path) -> None:
    policy = steered(folder, noise_bound=0.5)
    section = {"model_type": "steered_policy", "num_action_chunks": CHUNK, "hidden_dim": 16}
    options = {"options": {"noise_bound": 0.5}}
    save_policy(policy, policy_model({**section, **options}), SPEC, tmp_path / "steered")
    (tmp_path / "flow").rename(tmp_path / "gone")
    again = steered(str(tmp_path / "steered"), noise_bound=0.5)
    outputs = [item.act(item.prepare(observed()), greedy=True).actions for item in (policy, again)]
    assert torch.equal(*outputs)
    assert again.normalization == policy.normalization


def test_policies_without_noise_are_refused(tmp_path: Path) -> None:
    config = EmbodiedModelConfig(model_type="mlp_policy", hidden_dim=16, num_action_chunks=CHUNK)
    save_policy(make_model(config, SPEC), config, SPEC, tmp_path / "mlp")
    with pytest.raises(ConfigError, match="`mlp_policy` cannot be steered"):
        steered(str(tmp_path / "mlp"))
    with pytest.raises(ConfigError, match="none is named"):
        make_model(EmbodiedModelConfig(model_type="steered_policy", num_action_chunks=CHUNK), SPEC)


@pytest.mark.parametrize("scheduler", ["DDIM", "DDPM"])
def test_lerobots_diffusion_takes_the_noise(scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_lerobot.install(monkeypatch)
    options = {"type": "diffusion", "action_horizon": HORIZON, "config": {"noise_scheduler_type": scheduler}}
    config = policy_model({"model_type": "lerobot", "num_action_chunks": CHUNK, "options": options})
    policy: Any = make_model(config, SPEC)
    save_policy(policy, config, SPEC, tmp_path / "diffusion")
    if scheduler == "DDPM":
        with pytest.raises(ConfigError, match="`lerobot` cannot be steered"):
            steered(str(tmp_path / "diffusion"))
        return
    ours = steered(str(tmp_path / "diffusion"), noise_bound=2.0)
    output = ours.act(ours.prepare(observed()))
    noise = 2 * output.actions[:, 0, : HORIZON * ACTIONS].view(N, HORIZON, ACTIONS)
    chunk = policy.base.model({"observation.state": torch.from_numpy(observed()["states"])})[0] + noise
    np.testing.assert_allclose(ours.to_env(output.actions), chunk[:, :CHUNK].detach().numpy(), atol=1e-5)
