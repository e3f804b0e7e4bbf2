"""Running statistics of states: those of all rows at once, whatever came in which step, and saved exactly."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.learning.running_returns import check_running, with_states
from recipes.embodied.learning.trajectory import RolloutBuffer, RolloutChunks
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.normalization import Normalization, Statistics
from recipes.embodied.off_policy.off_policy_actor import OffPolicyActor
from recipes.embodied.workers.actor_worker import EmbodiedFSDPActor
from rlinf_core.errors import ConfigError
from rlinf_core.job.load import load_job
from tests.unit.recipes.language.in_threads import Hub, in_thread

SPEC = EnvSpec(5, 2)

STEPS = [
    torch.tensor(np.random.default_rng(step).normal(7, 1 + step, (5, 4, 3)), dtype=torch.float32) for step in range(4)
]
EVERY = torch.ones(5, 4, dtype=torch.bool)


def run(normalization: Normalization, steps: list[Tensor]) -> Normalization:
    """Return the normalization after steps whose rows were normalized by what there was before each."""
    for states in steps:
        normalization = with_states(normalization, normalization.normalized_states(states), EVERY)
    return normalization


def test_running_statistics_are_those_of_all_rows() -> None:
    normalization = run(Normalization(), STEPS)
    rows = torch.cat(STEPS).double().flatten(0, 1).numpy()
    assert normalization.states is not None
    assert normalization.rows == len(rows) == 80
    np.testing.assert_allclose(normalization.states.mean, rows.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(normalization.states.std, rows.std(axis=0), rtol=1e-6)
    assert normalization.actions is None


def test_rows_after_an_episode_do_not_count() -> None:
    counted = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    normalization = with_states(Normalization(), STEPS[0], counted)
    assert normalization.states is not None
    np.testing.assert_allclose(normalization.states.mean, STEPS[0][counted].double().mean(dim=0), rtol=1e-9)
    assert with_states(normalization, STEPS[1], torch.zeros_like(EVERY)) == normalization


def test_actors_have_the_statistics_of_all_their_rows() -> None:
    """Each of two sends its sums to the other; the second repeats what the first of them adds up."""
    parts, sums = STEPS[0].split(2, dim=1), list[Tensor]()
    counted = EVERY[:, :2]

    def halves(part: Tensor, mean: Tensor | None) -> list[Tensor]:
        rows = part.double().flatten(0, 1)
        return [torch.tensor(10.0).double(), rows.sum(dim=0)] + (
            [] if mean is None else [(rows - mean).square().sum(0)]
        )

    whole = STEPS[0].double().flatten(0, 1)
    sums = halves(parts[1], whole.mean(dim=0))
    calls = iter(sums)
    normalization = with_states(Normalization(), parts[0], counted, lambda value: value + next(calls))
    assert normalization.rows == 20
    assert normalization.states is not None
    np.testing.assert_allclose(normalization.states.std, whole.std(dim=0, correction=0), rtol=1e-9)


def test_resuming_goes_on_bitwise(tmp_path: Path) -> None:
    half = run(Normalization(), STEPS[:2])
    half.save(tmp_path)
    again = Normalization.load(tmp_path)
    assert again == half
    assert run(again or Normalization(), STEPS[2:]) == run(half, STEPS[2:])


def test_statistics_of_demonstrations_do_not_run_on() -> None:
    policy = cast("BasePolicy", SimpleNamespace(normalizes_states=True, normalization=Normalization()))
    check_running(policy)
    policy.normalization = run(Normalization(), STEPS[:1])
    check_running(policy)
    policy.normalization = Normalization("mean_std", states=Statistics.of(STEPS[0].flatten(0, 1).numpy()))
    with pytest.raises(ConfigError, match="the statistics that the policy was trained with"):
        check_running(policy)


def test_a_policy_that_does_not_normalize_keeps_no_statistics() -> None:
    policy = cast("BasePolicy", SimpleNamespace(normalizes_states=False, normalization=Normalization()))
    with pytest.raises(ConfigError, match="does not take running statistics of states") as caught:
        check_running(policy)
    assert "FeaturePolicy" in (caught.value.help or "")


def acting(actor: Any, seed: int) -> RolloutChunks:
    """Return the trajectories of a rollout of four steps in three environments, by the actor's policy as it is."""
    random, policy, buffer = np.random.default_rng(seed), actor._policy, RolloutBuffer(4, actor._state.version)
    torch.manual_seed(seed)
    for step in range(4):
        inputs = policy.prepare({"states": random.normal(5, 3, (3, SPEC.state_size)).astype(np.float32)})
        buffer.add_action(step, inputs, policy.act(inputs))
        outcome = {name: np.zeros((3, 1), bool) for name in ("terminations", "truncations")}
        rewards = random.normal(size=(3, 1)).astype(np.float32)
        buffer.add_outcome(step, {**outcome, "valid": np.ones((3, 1), bool), "rewards": rewards}, None)
    return buffer.finish(policy.values(inputs))


def learned(actor: Any, step: int) -> None:
    actor._step, actor._trajectories = step, acting(actor, step)
    actor.compute_advantages_and_returns(step)
    actor.run_training(step)


def test_actors_save_running_statistics_and_go_on_with_them(tmp_path: Path) -> None:
    """A checkpoint after two steps, and one more step from there: bitwise what an actor does without it."""
    overrides = ("actor.model.hidden_dim=8", "algorithm.normalize_observations=true", "algorithm.update_epoch=2")
    job = load_job("laptop", overrides, environ={})
    job.raise_if_bad()
    actors: list[Any] = []
    for _ in range(2):
        config = cast("EmbodiedConfig", job.config)
        actor: Any = in_thread(EmbodiedFSDPActor, config.actor.group_name, Hub(), 0, 1)(config)
        actor.init_worker(Layout(1, 1, 1, "trajectories"), SPEC)
        actors.append(actor)
    straight, resumed = actors
    for step in (1, 2):
        learned(straight, step)
    assert straight._policy.normalization.rows == 24
    straight.save_checkpoint(str(tmp_path))
    resumed.load_checkpoint(str(tmp_path))
    for actor in actors:
        learned(actor, 3)
    assert resumed._policy.normalization == straight._policy.normalization
    assert resumed._policy.normalization.rows == 36
    theirs = straight._policy.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in resumed._policy.state_dict().items())


def received(seed: int) -> RolloutChunks:
    """Return the trajectories of a rollout as off-policy learning sends them: states as they are observed."""
    states = torch.tensor(np.random.default_rng(seed).normal(5, 3, (4, 3, SPEC.state_size)), dtype=torch.float32)
    no = torch.zeros(4, 3, 1, dtype=torch.bool)
    steps = {
        "next/states": states + 1,
        "actions": torch.zeros(4, 3, 1, 2),
        "logprobs": torch.zeros(4, 3, 1, 2),
        "rewards": no.float(),
        "terminations": no,
        "truncations": no.clone(),
        "valid": ~no,
    }
    return RolloutChunks(0, 0, {"states": states}, steps, None)


def test_off_policy_actors_normalize_what_critics_see_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("actor.model.hidden_dim=8", "algorithm.normalize_observations=true", "env.train.total_num_envs=3")
    learning = ("algorithm.learning_starts=1", "algorithm.update_to_data=0.5")
    sac = ("actor.model.model_type=squashed_policy", "algorithm.loss_type=sac", "actor.global_batch_size=6")
    job = load_job("laptop", (*sac, *keys, *learning), environ={})
    job.raise_if_bad()
    actors: list[Any] = []
    for _ in range(2):
        config = cast("EmbodiedConfig", job.config)
        actor: Any = in_thread(OffPolicyActor, config.actor.group_name, Hub(), 0, 1)(config)
        actor.init_worker(Layout(1, 1, 1, "trajectories"), SPEC)
        monkeypatch.setattr(actor, "_receive", lambda step, attempt: [received(step)])
        actors.append(actor)
    straight, resumed = actors
    straight._step = 1
    straight.recv_rollout_batch(1)
    straight.run_training(1)
    normalization = straight._policy.normalization
    assert normalization.rows == 12
    np.testing.assert_allclose(normalization.states.mean, received(1).inputs["states"].mean(dim=(0, 1)), rtol=1e-5)
    straight.save_checkpoint(str(tmp_path))
    resumed.load_checkpoint(str(tmp_path))
    for actor in actors:
        learner = actor._algorithm
        seen = [module.normalization for module in (learner.policy, learner.critics, learner.target_critics)]
        assert seen == [normalization] * 3
