"""Compiled training passes: what they compute, and what a machine needs for them."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.registry import make_env
from recipes.embodied.models.base_policy import BasePolicy, Inputs
from recipes.embodied.models.registry import make_model
from recipes.embodied.workers.actor_base import compile_training, missing_compiler
from rlinf_core import ConfigError

HOST = torch.device("cpu")


def policy_and_samples() -> tuple[BasePolicy, Inputs, Tensor]:
    """Return a policy, and observations and actions of 16 environments."""
    torch.manual_seed(0)
    env = make_env("franka_kin", EnvSettings(num_envs=16, task="reach"))
    policy = make_model(EmbodiedModelConfig(hidden_dim=16), env.spec)
    inputs = policy.prepare(env.reset())
    return policy, inputs, policy.act(inputs).actions


def gradients(policy: BasePolicy, inputs: Inputs, actions: Tensor) -> dict[str, Tensor]:
    policy.zero_grad()
    result = policy(inputs, actions)
    assert result.values is not None
    (result.logprobs.mean() + result.values.mean() + policy.imitation_losses(inputs, actions).mean() ** 2).backward()
    return {name: weight.grad.clone() for name, weight in policy.named_parameters() if weight.grad is not None}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(missing_compiler(HOST) is not None, reason="there is no C++ compiler")
def test_compiled_passes_have_the_same_gradients() -> None:
    policy, inputs, actions = policy_and_samples()
    expected, names = gradients(policy, inputs, actions), list(policy.state_dict())
    compile_training(policy, ("imitation_losses",), HOST)
    torch.testing.assert_close(gradients(policy, inputs, actions), expected)
    # The last micro batch of a share may be smaller.
    fewer = {name: item[:5] for name, item in inputs.items()}
    assert gradients(policy, fewer, actions[:5]).keys() == expected.keys()
    assert list(policy.state_dict()) == names


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _, _ = policy_and_samples()
    monkeypatch.setenv("CXX", "nosuch++")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler \(nosuch\+\+\)") as raised:
        compile_training(policy, (), HOST)
    assert "apt install g++" in (raised.value.help or "")


def test_a_gpu_needs_triton_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("recipes.embodied.workers.actor_base.find_spec", lambda name: None)
    assert missing_compiler(HOST) is None
    missing = missing_compiler(torch.device("cuda"))
    assert missing is not None
    assert "triton" in missing[0]
