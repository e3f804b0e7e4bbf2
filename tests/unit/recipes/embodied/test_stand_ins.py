"""Stand-ins of a rehearsal: messages and weights of the true size."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import torch

from recipes.embodied.advice.stand_ins import StandInEnv, StandInPolicy
from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec
from recipes.embodied.models.registry import make_model
from recipes.training.weights.weight_sync import FlatWeights

SPEC = EnvSpec(3, 4, cameras={"top": (16, 16, 3)}, has_instructions=True)


def test_observations_are_those_of_the_spec() -> None:
    settings = EnvSettings(num_envs=5, options={"spec": asdict(SPEC)}, max_episode_steps=3)
    env = StandInEnv(settings)
    assert env.spec == SPEC
    observed = env.reset()
    assert {name: values.shape for name, values in observed.items()} == {
        "states": (5, 3),
        "images.top": (5, 16, 16, 3),
        "instructions": (5,),
    }
    result = env.step(np.ones((5, 1, 4), np.float32))
    assert result.rewards.shape == (5, 1)


def test_weights_are_as_many_as_asked_for_and_few_of_them_learn() -> None:
    config = EmbodiedModelConfig(
        model_type="recipes.embodied.advice.stand_ins:StandInPolicy", options={"numbers": 100_000}
    )
    policy = make_model(config, SPEC)
    assert isinstance(policy, StandInPolicy)
    sent = sum(buffer.numel() for buffer in FlatWeights.adopt(policy).buffers)
    assert 100_000 <= sent < 102_000
    assert sum(weight.numel() for weight in policy.parameters() if weight.requires_grad) < 500
    inputs = {"states": torch.zeros(6, 3)}
    output = policy.act(inputs)
    assert output.actions.shape == (6, 1, 4)
    assert policy(inputs, output.actions).logprobs.shape == (6, 1, 4)
