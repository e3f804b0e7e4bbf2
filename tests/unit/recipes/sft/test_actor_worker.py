"""The actor that learns from demonstrations, `recipes.sft.sft_program`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.demonstrations.data_errors import DatasetError
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.policy_folder import load_trained
from recipes.embodied.models.registry import make_model
from recipes.training.arrays import NonFiniteError
from rlinf_core import CheckpointError
from tests.unit.recipes.sft.conftest import ACTIONS, LENGTHS, STATES

Actor = Callable[..., Any]


def weights(actor: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = actor._policy.state_dict()
    return {name: value.clone() for name, value in state.items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


def test_a_step_learns_from_so_many_batches(actor_of: Actor) -> None:
    actor = actor_of()
    steps: list[int] = []
    actor._state.optimizer.register_step_post_hook(lambda *arguments: steps.append(1))
    metrics = actor.learn(2)
    assert len(steps) == 4
    # Two steps of four batches of 16 rows each.
    assert metrics["train/epoch"] == 2 * 4 * 16 / sum(LENGTHS)
    assert metrics["train/actor/lr"] == actor._config.actor.optim.lr
    assert actor._state.version == 1


def test_what_was_shown_is_learned(actor_of: Actor) -> None:
    actor = actor_of("data.batches_per_step=60", "actor.optim.lr=0.01")
    first, *_, last = [actor.learn(step)["train/actor/bc_loss"] for step in (1, 2, 3)]
    assert last < first - 1


def test_what_a_step_draws_depends_on_its_number_alone(actor_of: Actor) -> None:
    one, other, later = actor_of(), actor_of(), actor_of()
    torch.manual_seed(1)
    one.learn(1)
    torch.manual_seed(2)
    other.learn(1)
    later.learn(2)
    assert same(weights(one), weights(other))
    assert not same(weights(one), weights(later))


def test_a_batch_is_learned_from_in_parts(actor_of: Actor) -> None:
    actor = actor_of("actor.micro_batch_size=4")
    sizes: list[int] = []
    loss = actor._shown.loss
    actor._shown.loss = lambda policy, rows: (sizes.append(rows), loss(policy, rows))[1]
    actor.learn(1)
    assert sizes == [4] * 16


def test_statistics_of_the_data_become_the_policys(actor_of: Actor, tmp_path: Path) -> None:
    assert actor_of("data.normalization=none")._policy.normalization == Normalization()
    actor = actor_of()
    normalization = actor._policy.normalization
    assert normalization.scheme == "mean_std"
    assert normalization.actions is not None
    assert np.allclose(normalization.actions.mean, actor._shown.demonstrations.actions.mean(axis=0), atol=1e-6)


def test_reinforcement_learning_goes_on_from_what_was_learned(actor_of: Actor, tmp_path: Path) -> None:
    actor = actor_of()
    actor.learn(1)
    actor.save_checkpoint(str(tmp_path / "global_step_1"))
    spec = EnvSpec(STATES, ACTIONS, has_instructions=True)
    policy = make_model(actor._config.actor.model, spec)
    model = actor._config.actor.model
    load_trained(policy, model, spec, str(tmp_path / "global_step_1"))
    assert same(dict(policy.state_dict()), weights(actor))
    assert policy.normalization == actor._policy.normalization


def test_a_run_goes_on_as_if_it_had_not_stopped(actor_of: Actor, tmp_path: Path) -> None:
    through, stopped, resumed = actor_of(), actor_of(), actor_of()
    for step in (1, 2):
        through.learn(step)
    stopped.learn(1)
    stopped.save_checkpoint(str(tmp_path / "global_step_1"))
    assert resumed.load_checkpoint(str(tmp_path / "global_step_1")) == 1
    resumed.learn(2)
    assert same(weights(through), weights(resumed))


def test_a_checkpoint_of_another_policy_is_refused(actor_of: Actor, tmp_path: Path) -> None:
    actor_of("actor.model.hidden_dim=8").save_checkpoint(str(tmp_path / "global_step_1"))
    with pytest.raises(CheckpointError, match="cannot be read") as raised:
        actor_of().load_checkpoint(str(tmp_path / "global_step_1"))
    assert "must have the same sizes as when saved" in (raised.value.help or "")


def test_data_of_another_environment_are_refused(actor_of: Actor) -> None:
    with pytest.raises(DatasetError, match="has 8 numbers in an action; the environment has 4"):
        actor_of(spec=EnvSpec(STATES, 4))


@pytest.mark.parametrize("reaction", ["stop", "skip"])
def test_a_loss_that_is_not_finite_changes_no_weight(actor_of: Actor, reaction: str) -> None:
    actor = actor_of(f"runner.on_nonfinite={reaction}")
    actor._shown.demonstrations.actions[:] = np.nan
    before = weights(actor)
    if reaction == "stop":
        with pytest.raises(NonFiniteError):
            actor.learn(1)
    else:
        actor.learn(1)
        assert len(actor.warnings) == 1
    assert same(before, weights(actor))


def test_a_classifier_learns_from_pictures_alone(actor_of: Actor) -> None:
    actor = actor_of("data.target=success", "actor.model.model_type=cnn_policy", "data.batches_per_step=1")
    assert actor._spec == EnvSpec(0, 1, num_choices=2, cameras={"main": (16, 16, 3)})
    assert actor._policy.normalization == Normalization()
    assert actor.learn(1)["train/actor/bc_loss"] > 0


def test_weights_of_another_policy_or_environment_are_named(actor_of: Actor, tmp_path: Path) -> None:
    actor_of().save_checkpoint(str(tmp_path / "global_step_1"))
    model, load = actor_of()._config.actor.model, str(tmp_path / "global_step_1")
    for changed, spec, words in (
        (model.model_copy(update={"hidden_dim": 8}), EnvSpec(STATES, ACTIONS), "has `hidden_dim: 16`"),
        (model, EnvSpec(STATES, 4), "has 8 numbers in an action; the environment has 4"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load_trained(make_model(changed, spec), changed, spec, load)
