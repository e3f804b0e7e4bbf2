"""Running statistics of states and of returns: as over all rows, whatever came in which step, and saved exactly."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.learning.running_returns import FOLDER, RunningReturns, check_running, with_states
from recipes.embodied.learning.trajectory import RolloutBuffer, RolloutChunks
from recipes.embodied.loop.protocols import EPISODES, Layout
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.feature_policy import MlpPolicy
from recipes.embodied.models.normalization import Normalization, Statistics
from recipes.embodied.off_policy.off_policy_actor import OffPolicyActor
from recipes.embodied.workers.actor_worker import EmbodiedFSDPActor
from recipes.embodied.workers.rollout_worker import MultiStepRolloutWorker
from rlinf_core import CheckpointError
from rlinf_core.errors import ConfigError, RuntimeFailure
from rlinf_core.job.load import load_job
from rlinf_core.process import pacing
from rlinf_core.process.pacing import PacedCalls, Pacing
from tests.known import known
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
    np.testing.assert_allclose(known(normalization.states).mean, STEPS[0][counted].double().mean(dim=0), rtol=1e-9)
    assert with_states(normalization, STEPS[1], torch.zeros_like(EVERY)) == normalization


def test_actors_have_the_statistics_of_all_their_rows() -> None:
    """Each of two sends its sums to the other; the second repeats what the first of them adds up."""
    parts = STEPS[0].split(2, dim=1)
    counted = EVERY[:, :2]

    def halves(part: Tensor, mean: Tensor) -> list[Tensor]:
        rows = part.double().flatten(0, 1)
        return [torch.tensor(10.0).double(), rows.sum(dim=0), (rows - mean).square().sum(0)]

    whole = STEPS[0].double().flatten(0, 1)
    calls = iter(halves(parts[1], whole.mean(dim=0)))
    normalization = with_states(Normalization(), parts[0], counted, lambda value: value + next(calls))
    assert normalization.rows == 20
    np.testing.assert_allclose(known(normalization.states).std, whole.std(dim=0, correction=0), rtol=1e-9)


def test_resuming_goes_on_bitwise(tmp_path: Path) -> None:
    half = run(Normalization(), STEPS[:2])
    half.save(tmp_path)
    again = Normalization.load(tmp_path)
    assert again == half
    assert run(again or Normalization(), STEPS[2:]) == run(half, STEPS[2:])


def test_statistics_run_only_for_policies_without_any() -> None:
    policy = cast("BasePolicy", SimpleNamespace(normalizes_states=True, normalization=Normalization()))
    check_running(policy)
    policy.normalization = run(Normalization(), STEPS[:1])
    check_running(policy)
    policy.normalization = Normalization("mean_std", states=Statistics.of(STEPS[0].flatten(0, 1).numpy()))
    with pytest.raises(ConfigError, match="the statistics that the policy was trained with"):
        check_running(policy)
    policy = cast("BasePolicy", SimpleNamespace(normalizes_states=False, normalization=Normalization()))
    with pytest.raises(ConfigError, match="does not take running statistics of states") as caught:
        check_running(policy)
    assert "FeaturePolicy" in (caught.value.help or "")


def actors_of(kind: type[Any], count: int, *overrides: str) -> list[Any]:
    """Return actors of one job, each in a thread of its own."""
    job = load_job("embodied/pick-laptop", ("actor.model.hidden_dim=8", *overrides), environ={})
    job.raise_if_bad()
    config, actors = cast("EmbodiedConfig", job.config), list[Any]()
    for _ in range(count):
        actor: Any = in_thread(kind, config.actor.group_name, Hub(), 0, 1)(config)
        actor.init_worker(Layout(1, 1, 1, "trajectories"), SPEC)
        actors.append(actor)
    return actors


class Drawing(MlpPolicy):
    """A policy of a user's, with a number that is no weight."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.drawn = float(torch.rand(()))


class Looking(Drawing):
    observed_steps = 2


def test_rollout_workers_make_the_actors_policy() -> None:
    of = f"actor.model.model_type={__name__}"
    kinds = (EmbodiedFSDPActor, MultiStepRolloutWorker)
    actor, rollout = (actors_of(kind, 1, f"{of}:Drawing")[0]._policy for kind in kinds)
    assert actor.drawn == rollout.drawn
    with pytest.raises(ConfigError, match="`Looking` acts on 2 consecutive observations, and the environments pass 1"):
        actors_of(MultiStepRolloutWorker, 1, f"{of}:Looking")


def check_weights(one: Any, other: Any) -> None:
    theirs = other._policy.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in one._policy.state_dict().items())


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


def test_phases_out_of_order_are_named() -> None:
    actor: Any = actors_of(EmbodiedFSDPActor, 1, "algorithm.normalize_rewards=true")[0]
    with pytest.raises(RuntimeFailure, match=r"no trajectories to learn from\n.*`recv_rollout_batch`"):
        actor.compute_advantages_and_returns()
    learned(actor, 1)
    with pytest.raises(RuntimeFailure, match=r"no samples to learn from\n.*`compute_advantages_and_returns`"):
        actor.run_training()
    with pytest.raises(RuntimeFailure, match=r"no weights of the actor to act with\n.*`sync_model_from_actor`"):
        MultiStepRolloutWorker(actor._config).generate(1)


def test_actors_save_running_statistics_and_go_on_with_them(tmp_path: Path) -> None:
    """A checkpoint after two steps, and one more step from there: bitwise what an actor does without it."""
    keys = ("algorithm.normalize_observations=true", "algorithm.update_epoch=2")
    straight, resumed = actors_of(EmbodiedFSDPActor, 2, *keys)
    for step in (1, 2):
        learned(straight, step)
    assert straight._policy.normalization.rows == 24
    straight.save_checkpoint(str(tmp_path))
    resumed.load_checkpoint(str(tmp_path))
    for actor in (straight, resumed):
        learned(actor, 3)
    assert resumed._policy.normalization == straight._policy.normalization
    assert resumed._policy.normalization.rows == 36
    check_weights(resumed, straight)


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


def off_policy_actors(monkeypatch: pytest.MonkeyPatch, count: int, *overrides: str) -> list[Any]:
    """Return actors of SAC to which the same rollout arrives in every step."""
    sac = ("actor.model.model_type=squashed_policy", "algorithm.loss_type=sac", "actor.global_batch_size=6")
    learning = ("algorithm.learning_starts=1", "algorithm.update_to_data=0.5", "env.train.total_num_envs=3")
    actors = actors_of(OffPolicyActor, count, *sac, *learning, *overrides)
    for actor in actors:
        monkeypatch.setattr(actor, "_receive", lambda step, attempt: [received(step)])
    return actors


def test_off_policy_actors_normalize_what_critics_see_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, resumed = off_policy_actors(monkeypatch, 2, "algorithm.normalize_observations=true")
    straight._step = 1
    straight.recv_rollout_batch(1)
    straight.run_training(1)
    normalization = straight._policy.normalization
    assert normalization.rows == 12
    np.testing.assert_allclose(normalization.states.mean, received(1).inputs["states"].mean(dim=(0, 1)), rtol=1e-5)
    straight.save_checkpoint(str(tmp_path))
    resumed.load_checkpoint(str(tmp_path))
    for actor in (straight, resumed):
        learner = actor._algorithm
        seen = [module.normalization for module in (learner.policy, learner.critics, learner.target_critics)]
        assert seen == [normalization] * 3


GAMMA, LENGTH, LANES, CHUNK, PASSES = 0.9, 6, 3, 2, 2


def rollout(seed: int, columns: int = PASSES * LANES) -> dict[str, Tensor]:
    """Return random steps; nothing counts in a chunk after the end of an episode."""
    random = np.random.default_rng(seed)
    ends = random.random((LENGTH, columns, CHUNK)) < 0.2
    over = np.concatenate((np.zeros_like(ends[..., :1]), ends.cumsum(axis=2)[..., :-1] > 0), axis=2)
    cut = random.random(ends.shape) < 0.5
    arrays = {
        "rewards": random.normal(3, 7, ends.shape).astype(np.float32),
        "terminations": ends & ~over & ~cut,
        "truncations": ends & ~over & cut,
        "valid": ~over,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def looped(rollouts: list[dict[str, Tensor]], *, resets: bool) -> list[float]:
    """Return all discounted returns, one environment and one action after the other."""
    returns: list[float] = []
    running = [0.0] * LANES
    for steps in rollouts:
        for number in range(PASSES):
            running = [0.0] * LANES if resets else running
            for lane in range(LANES):
                column = number * LANES + lane
                for step in range(LENGTH):
                    for action in range(CHUNK):
                        if not steps["valid"][step, column, action]:
                            continue
                        running[lane] = GAMMA * running[lane] + float(steps["rewards"][step, column, action])
                        returns.append(running[lane])
                        if steps["terminations"][step, column, action] or steps["truncations"][step, column, action]:
                            running[lane] = 0.0
    return returns


def test_a_return_ends_though_the_last_step_does_not_count() -> None:
    """As in the step at which a simulator failed."""
    steps = {name: torch.zeros(4, 1, 1, dtype=torch.bool) for name in ("terminations", "truncations", "valid")}
    steps["truncations"][2], steps["valid"][[0, 1, 3]] = True, True
    running = RunningReturns(1.0, 1, resets=False)
    running.normalized({**steps, "rewards": torch.ones(4, 1, 1)})
    assert known(running._running).tolist() == [1.0]
    # A resumed run may have another number of environments.
    running.normalized(
        {name: tensor.expand(4, 3, 1) for name, tensor in (steps | {"rewards": torch.ones(4, 1, 1)}).items()}
    )
    assert known(running._running).tolist() == [1.0] * 3


@pytest.mark.parametrize("resets", [True, False])
def test_rewards_are_divided_by_the_deviation_of_all_returns(resets: bool) -> None:
    rollouts = [rollout(seed) for seed in range(3)]
    running = RunningReturns(GAMMA, PASSES, resets=resets)
    for count, steps in enumerate(rollouts, 1):
        scaled = running.normalized(steps)
        deviation = np.sqrt(np.var(looped(rollouts[:count], resets=resets)) + 1e-8)
        wanted = np.clip(steps["rewards"].numpy() / deviation, -10, 10)
        np.testing.assert_allclose(scaled.numpy(), wanted, rtol=1e-5)
        assert scaled.dtype == torch.float32


def test_large_rewards_are_clipped() -> None:
    running = RunningReturns(GAMMA, PASSES, resets=True)
    for seed in range(60):
        running.normalized(rollout(seed))
    steps = rollout(60)
    steps["rewards"][0, 0, 0] = 1e6
    assert float(running.normalized(steps).max()) == 10


def test_actors_divide_by_the_deviation_over_all_of_them() -> None:
    """Two actors of half the environments: their sums are added up, in the order in which they ask."""
    whole, wanted = rollout(0, 2 * LANES), RunningReturns(GAMMA, 1, resets=True)
    halves = [{name: part[:, LANES * half : LANES * (half + 1)] for name, part in whole.items()} for half in (0, 1)]
    expected = wanted.normalized(whole)
    returns = [RunningReturns(GAMMA, 1, resets=True)._returns(*(_unfolded(part))) for part in halves]
    mean = torch.cat(returns).mean()
    others = iter([torch.tensor(float(len(returns[1]))), returns[1].sum(), (returns[1] - mean).square().sum()])
    mine = RunningReturns(GAMMA, 1, resets=True).normalized(halves[0], lambda value: value + next(others))
    torch.testing.assert_close(mine, expected[:, :LANES])


def _unfolded(steps: dict[str, Tensor]) -> list[Tensor]:
    names = ("rewards", "terminations", "truncations", "valid")
    return [steps[name].transpose(1, 2).flatten(0, 1) for name in names]


def test_a_checkpoint_goes_on_where_returns_stood(tmp_path: Path) -> None:
    straight = RunningReturns(GAMMA, PASSES, resets=False)
    straight.normalized(rollout(0))
    straight.save(tmp_path, 0)
    resumed, spread, begun = (RunningReturns(GAMMA, PASSES, resets=False) for _ in range(3))
    begun.load(tmp_path, 0, 1)  # without a state of the environments, whose episodes begin
    assert (begun._count, begun._running) == (straight._count, None)
    (tmp_path / EPISODES).mkdir()
    resumed.load(tmp_path, 0, 1)
    spread.load(tmp_path, 1, 2)  # by two ranks: the same deviation, and episodes that begin
    assert torch.equal(resumed.normalized(rollout(1)), straight.normalized(rollout(1)))
    assert (spread._count, spread._running) == (json.loads((tmp_path / FOLDER / "0.json").read_text())["count"], None)
    (tmp_path / FOLDER / "0.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        resumed.load(tmp_path, 0, 1)


def test_actors_save_running_returns_and_go_on_with_them(tmp_path: Path) -> None:
    keys = ("algorithm.normalize_rewards=true", "algorithm.update_epoch=2")
    straight, resumed = actors_of(EmbodiedFSDPActor, 2, *keys)
    learned(straight, 1)
    straight.save_checkpoint(str(tmp_path))
    (tmp_path / EPISODES).mkdir()  # the state of the environments
    resumed.load_checkpoint(str(tmp_path))
    for actor in (straight, resumed):
        learned(actor, 2)
    check_weights(resumed, straight)
    straight._trajectories = acting(straight, 3)
    raw = straight._trajectories.steps["rewards"].clone()
    metrics = straight.compute_advantages_and_returns(3)
    assert metrics["rollout/reward"] == pytest.approx(float(raw.sum(dim=(0, 2)).mean()))


def test_updates_of_a_rehearsal_are_counted_and_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "active", PacedCalls(Pacing({})))
    (actor,) = off_policy_actors(monkeypatch, 1)
    before = {name: value.clone() for name, value in actor._policy.state_dict().items()}
    actor._step = 1
    actor.recv_rollout_batch(1)
    # An update for every second one of 12 steps but the first, at which learning starts.
    assert actor.run_training(1)["train/updates"] == 5.0
    assert all(torch.equal(before[name], value) for name, value in actor._policy.state_dict().items())
