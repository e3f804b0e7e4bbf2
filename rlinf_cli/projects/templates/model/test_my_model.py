"""The policy trains on what it drew, and its job file is valid."""

from __future__ import annotations

from pathlib import Path

import torch

from recipes.embodied import EmbodiedModelConfig, EnvSettings, make_env
from rlinf_core import load_job

from my_model import Gaussian


def test_what_is_drawn_is_what_is_evaluated() -> None:
    env = make_env("franka_kin", EnvSettings(num_envs=4, task="reach"))
    policy = Gaussian(EmbodiedModelConfig(hidden_dim=32, num_action_chunks=2, add_value_head=True), env.spec)
    inputs = policy.prepare(env.reset())
    output = policy.act(inputs)
    evaluated = policy(inputs, output.actions)
    torch.testing.assert_close(evaluated.logprobs, output.logprobs)
    torch.testing.assert_close(evaluated.values, output.values)
    assert env.step(policy.to_env(output.actions)).rewards.shape == (4, 2)


def test_job_file_is_valid() -> None:
    job = load_job(str(Path(__file__).with_name("my_model.yaml")))
    assert job.ok, job.diagnostics
