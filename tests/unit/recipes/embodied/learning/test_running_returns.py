"""Rewards normalized by the running deviation of discounted returns, against a loop over single environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.learning.running_returns import FOLDER, RunningReturns
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.workers.actor_worker import EmbodiedFSDPActor
from rlinf_core import CheckpointError
from rlinf_core.job.load import load_job
from tests.unit.recipes.embodied.learning.test_running_states import SPEC, acting, learned
from tests.unit.recipes.language.in_threads import Hub, in_thread

GAMMA, STEPS, LANES, CHUNK, PASSES = 0.9, 6, 3, 2, 2


def rollout(seed: int, columns: int = PASSES * LANES) -> dict[str, Tensor]:
    """Return random steps; nothing counts in a chunk after the end of an episode."""
    random = np.random.default_rng(seed)
    ends = random.random((STEPS, columns, CHUNK)) < 0.2
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
                for step in range(STEPS):
                    for action in range(CHUNK):
                        if not steps["valid"][step, column, action]:
                            continue
                        running[lane] = GAMMA * running[lane] + float(steps["rewards"][step, column, action])
                        returns.append(running[lane])
                        if steps["terminations"][step, column, action] or steps["truncations"][step, column, action]:
                            running[lane] = 0.0
    return returns


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
    resumed, spread = (RunningReturns(GAMMA, PASSES, resets=False) for _ in range(2))
    resumed.load(tmp_path, 0, 1)
    spread.load(tmp_path, 1, 2)  # by two ranks: the same deviation, and episodes that begin
    assert torch.equal(resumed.normalized(rollout(1)), straight.normalized(rollout(1)))
    assert (spread._count, spread._running) == (json.loads((tmp_path / FOLDER / "0.json").read_text())["count"], None)
    (tmp_path / FOLDER / "0.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        resumed.load(tmp_path, 0, 1)


def test_actors_save_running_returns_and_go_on_with_them(tmp_path: Path) -> None:
    overrides = ("actor.model.hidden_dim=8", "algorithm.normalize_rewards=true", "algorithm.update_epoch=2")
    job = load_job("laptop", overrides, environ={})
    job.raise_if_bad()
    actors: list[Any] = []
    for _ in range(2):
        config = cast("EmbodiedConfig", job.config)
        actor: Any = in_thread(EmbodiedFSDPActor, config.actor.group_name, Hub(), 0, 1)(config)
        actor.init_worker(Layout(1, 1, 1, "trajectories"), SPEC)
        actors.append(actor)
    straight, resumed = actors
    learned(straight, 1)
    straight.save_checkpoint(str(tmp_path))
    resumed.load_checkpoint(str(tmp_path))
    for actor in actors:
        learned(actor, 2)
    theirs = straight._policy.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in resumed._policy.state_dict().items())
    straight._trajectories = acting(straight, 3)
    raw = straight._trajectories.steps["rewards"].clone()
    metrics = straight.compute_advantages_and_returns(3)
    assert metrics["rollout/reward"] == pytest.approx(float(raw.sum(dim=(0, 2)).mean()))
