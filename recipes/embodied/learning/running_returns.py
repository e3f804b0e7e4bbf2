"""The running standard deviation of discounted returns, by which rewards are divided: `algorithm.normalize_rewards`.

In each environment R = gamma R + r, from 0 after each end. Rewards are divided by the std of all R so far, including
the current rollout's, and clipped, as by `VecNormalize` of Stable-Baselines3, which updates it at each action.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from recipes.embodied.learning.trajectory import flatten_chunks, fold_chunks
from recipes.embodied.loop.protocols import EPISODES
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.normalization import Normalization, Statistics
from recipes.training.typed_tensors import floats
from rlinf_core import CheckpointError, ConfigError
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object

FOLDER: Final = "returns"
_LARGEST: Final = 10.0
_EPSILON: Final = 1e-8


class RunningReturns:
    """The standard deviation of discounted returns, and the running return of each environment.

    Args:
        gamma: discount of rewards per action.
        passes: the passes of a rollout through all environments.
        resets: whether each pass begins new episodes.
    """

    def __init__(self, gamma: float, passes: int, *, resets: bool) -> None:
        self._gamma, self._passes, self._resets = gamma, passes, resets
        self._count = 0
        self._mean = self._squares = 0.0
        # By environment, float64 [B]; None: episodes begin.
        self._running: Tensor | None = None

    def normalized(self, steps: dict[str, Tensor], reduce_sum: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Add a rollout's returns to the statistics, and return its normalized rewards.

        Args:
            steps: `rewards` float32 and `terminations`, `truncations`, `valid` bool, [T, passes * B, C].
            reduce_sum: sums a tensor over actors; None: a single actor.

        Returns:
            float32 [T, passes * B, C].
        """
        names = ("rewards", "terminations", "truncations", "valid")
        columns = {name: flatten_chunks(steps[name]).chunk(self._passes, dim=1) for name in names}
        returns = torch.cat([self._returns(*(columns[name][index] for name in names)) for index in range(self._passes)])
        self._add(returns, reduce_sum or alone)
        deviation = (self._squares / max(1, self._count) + _EPSILON) ** 0.5
        scaled = (flatten_chunks(steps["rewards"]).double() / deviation).clamp(-_LARGEST, _LARGEST)
        return fold_chunks(scaled.to(steps["rewards"].dtype), steps["rewards"].shape[2]).contiguous()

    def _returns(self, rewards: Tensor, terminations: Tensor, truncations: Tensor, valid: Tensor) -> Tensor:
        """Return the discounted return after each valid action, float64 [n]."""
        running = self._running
        # A resumed run may have another number of environments.
        if running is None or self._resets or len(running) != rewards.shape[1]:
            running = torch.zeros(rewards.shape[1], dtype=torch.float64)
        seen: list[Tensor] = []
        for reward, ended, counted in zip(rewards.double(), terminations | truncations, valid, strict=True):
            running = torch.where(counted, self._gamma * running + reward, running)
            seen.append(running[counted])
            running = torch.where(ended, 0.0, running)
        self._running = running
        return torch.cat(seen)

    def _add(self, returns: Tensor, add_up: Callable[[Tensor], Tensor]) -> None:
        """Merge returns into the statistics, by Chan et al. (1979), eq. 1.5."""
        count = round(float(add_up(torch.tensor(float(len(returns)), dtype=torch.float64))))
        if not count:
            return
        mean = float(add_up(returns.sum())) / count
        squares = float(add_up((returns - mean).square().sum()))
        total, away = self._count + count, mean - self._mean
        self._squares += squares + away**2 * (self._count * count / total)
        self._mean += away * (count / total)
        self._count = total

    def save(self, folder: Path, rank: int) -> None:
        """Write the state for `load` into a checkpoint; each rank has its own environments."""
        running = None if self._running is None else floats(self._running)
        about = {"count": self._count, "mean": self._mean, "squares": self._squares, "running": running}
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        (folder / FOLDER / f"{rank}.json").write_text(json.dumps(about) + "\n")

    def load(self, folder: Path, rank: int, world_size: int) -> None:
        """Load the state that `save` wrote; do nothing if the checkpoint has none.

        The running returns start over as their episodes do: with another number of ranks, which have other
        environments, and without a state of the environments.

        Raises:
            CheckpointError: the state is damaged.
        """
        files = sorted((folder / FOLDER).glob("*.json"))
        if not files:
            return
        same = len(files) == world_size
        file = folder / FOLDER / f"{rank if same else 0}.json"
        continues = same and (folder / EPISODES).is_dir()
        try:
            about: dict[str, Any] = load_json_object(read_bounded(file))
            self._count, self._mean, self._squares = int(about["count"]), float(about["mean"]), float(about["squares"])
            running = about["running"] if continues else None
            self._running = None if running is None else torch.tensor(running, dtype=torch.float64)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"`{file}` cannot be read", why=str(error), help="resume from an earlier checkpoint"
            ) from None


def check_running(policy: BasePolicy) -> None:
    """Check that a policy can use running statistics of states.

    Raises:
        ConfigError: the policy does not normalize states, or has statistics of demonstrations with which its weights
            were trained.
    """
    if not policy.normalizes_states:
        raise ConfigError(
            f"`{type(policy).__name__}` does not take running statistics of states",
            why="it does not say that it normalizes them: `normalizes_states` is false",
            help="derive it from `FeaturePolicy`, or remove `algorithm.normalize_observations`",
        )
    normalization = policy.normalization
    if normalization.rows is None and normalization != Normalization():
        raise ConfigError(
            "`algorithm.normalize_observations` would change the statistics that the policy was trained with",
            why="they came with its weights, and are not running ones",
            help="remove `algorithm.normalize_observations`",
        )


def alone(value: Tensor) -> Tensor:
    """Return the value unchanged: the sum over a single actor."""
    return value


def with_states(
    normalization: Normalization,
    states: Tensor,
    counted: Tensor,
    reduce_sum: Callable[[Tensor], Tensor] | None = None,
    *,
    raw: bool = False,
) -> Normalization:
    """Return the normalization updated by the states of a step.

    Args:
        normalization: the normalization that was applied to `states`, if it has statistics.
        states: float [..., S], of a step.
        counted: bool [...], which states belong to an episode.
        reduce_sum: sums a tensor over actors; None for a single actor.
        raw: whether the states are as observed, not normalized.
    """
    rows = states[counted].double().cpu()
    old, before = normalization.states, normalization.rows or 0
    if old is not None and not raw:
        shift, scale, offset = old.affine(normalization.scheme, normalization.epsilon)
        rows = (rows + offset) * torch.from_numpy(scale).double() + torch.from_numpy(shift).double()  # pyright: ignore[reportUnknownMemberType]
    add_up = reduce_sum or alone
    count = round(float(add_up(torch.tensor(float(len(rows)), dtype=torch.float64))))
    if not count:
        return normalization
    mean = add_up(rows.sum(dim=0)) / count
    squares = add_up((rows - mean).square().sum(dim=0))
    total = before + count
    if old is not None:
        old_mean, old_deviation = (torch.tensor(row, dtype=torch.float64) for row in (old.mean, old.std))
        away = mean - old_mean
        mean = old_mean + away * (count / total)
        squares = squares + old_deviation.square() * before + away.square() * (before * count / total)
    deviation = (squares / total).sqrt()
    return replace(normalization, states=Statistics.of_moments(floats(mean), floats(deviation)), rows=total)
