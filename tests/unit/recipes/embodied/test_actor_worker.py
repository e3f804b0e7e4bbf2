"""How an actor learns from a batch, without the processes around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from recipes.embodied.actor_worker import EmbodiedFSDPActor
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.envs.base import EnvSpec
from recipes.embodied.learning import Samples
from recipes.embodied.models.registry import make_model
from recipes.embodied.optimizer import make_optimizer
from recipes.embodied.sharding import Alone
from rlinf_core.algorithms.losses.inputs import LossSettings
from rlinf_core.algorithms.registry import get_policy_loss
from rlinf_core.job.load import load_job

SAMPLES, STATES, ACTIONS = 24, 5, 3


def actor(*overrides: str) -> Any:
    """Return one that was not launched, with what learning from a batch needs."""
    job = load_job("laptop", ("actor.model.hidden_dim=8", *overrides), environ={})
    job.raise_if_bad()
    config = cast("EmbodiedConfig", job.config)
    torch.manual_seed(0)
    policy = make_model(config.actor.model, EnvSpec(STATES, ACTIONS))
    made: Any = EmbodiedFSDPActor(config)
    made._rlinf_bound = SimpleNamespace(placement=SimpleNamespace(world_size=1))
    made.torch_device = torch.device("cpu")
    made._policy, made._holding = policy, Alone(policy, 1)
    made._optimizer = make_optimizer(policy, config.actor.optim)
    made._loss, made._settings = get_policy_loss(config.algorithm.loss_type), LossSettings.of(config.algorithm)
    return made


def batch(*, masked: bool) -> Samples:
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "actions": numbers(SAMPLES, 1, ACTIONS),
        "old_logprobs": numbers(SAMPLES, 1) - 4,
        "advantages": numbers(SAMPLES, 1),
        "old_values": numbers(SAMPLES, 1),
        "returns": numbers(SAMPLES, 1),
    }
    if masked:
        # Unequally many in the parts, and none in the first.
        counted = torch.arange(SAMPLES)[:, None] >= 10
        tensors |= {"mask": counted, "value_mask": counted}
    return Samples({"states": numbers(SAMPLES, STATES)}, tensors)


@pytest.mark.parametrize("masked", [False, True])
def test_a_batch_in_parts_teaches_and_tells_what_it_does_in_one(masked: bool) -> None:
    one, parted = (actor("algorithm.entropy_bonus=0.01") for _ in range(2))
    (told,) = one._update(batch(masked=masked), SAMPLES)
    figures = parted._update(batch(masked=masked), SAMPLES // 3)
    assert len(figures) == 3
    for name in ("actor/policy_loss", "actor/entropy", "critic/value_loss", "actor/grad_norm"):
        mean = torch.stack([each[name] for each in figures]).mean()
        torch.testing.assert_close(mean, told[name], rtol=1e-5, atol=1e-6, msg=name)
    for mine, theirs in zip(one._policy.parameters(), parted._policy.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
