"""An actor that learns off-policy, in a rehearsal: as many updates, and nothing computed."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.off_policy.off_policy_actor import OffPolicyActor
from rlinf_core.job.load import load_job
from rlinf_core.process import pacing
from rlinf_core.process.pacing import PacedCalls, Pacing
from tests.unit.recipes.embodied.learning.test_running_states import SPEC, received
from tests.unit.recipes.language.in_threads import Hub, in_thread


def test_updates_are_counted_and_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("actor.model.hidden_dim=8", "env.train.total_num_envs=3", "actor.model.model_type=squashed_policy")
    learning = ("algorithm.loss_type=sac", "algorithm.learning_starts=1", "algorithm.update_to_data=0.5")
    job = load_job("laptop", (*words, *learning, "actor.global_batch_size=6"), environ={})
    job.raise_if_bad()
    config = cast("EmbodiedConfig", job.config)
    monkeypatch.setattr(pacing, "active", PacedCalls(Pacing({})))
    actor: Any = in_thread(OffPolicyActor, config.actor.group_name, Hub(), 0, 1)(config)
    actor.init_worker(Layout(1, 1, 1, "trajectories"), SPEC)

    def arrives(*_: Any) -> list[Any]:
        return [received(1)]

    monkeypatch.setattr(actor, "_receive", arrives)
    before = {name: value.clone() for name, value in actor._policy.state_dict().items()}
    actor._step = 1
    actor.recv_rollout_batch(1)
    # An update for every second one of 12 steps but the first, at which learning starts.
    assert actor.run_training(1)["train/updates"] == 5.0
    assert all(torch.equal(before[name], value) for name, value in actor._policy.state_dict().items())
