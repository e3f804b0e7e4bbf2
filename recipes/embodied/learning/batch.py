"""Training samples made of trajectories: advantages, returns, masks, batches and micro batches.

Pure functions of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recipes.embodied.config.algorithm_config import PolicyGradientConfig
from recipes.embodied.learning.running_returns import alone
from recipes.embodied.learning.trajectory import (
    RolloutChunks,
    flatten_chunks,
    fold_chunks,
    leading,
    rewards_to_level,
    sum_to_level,
)
from recipes.embodied.models.base_policy import Inputs
from recipes.sections.algorithm import GROUP_ADVANTAGES
from recipes.training.typed_tensors import explained_variance, integers
from rlinf_core import Advantages, AdvantageSettings, Trajectories, get_advantage
from rlinf_core.algorithms.advantages import AdvantageFunction, estimate, groups_that_vary, total_rewards
from rlinf_core.algorithms.options import checked_options

ReduceSum = Callable[[Tensor], Tensor]

# The most numbers of an observation that are examined in a step.
_SPREAD_NUMBERS = 1 << 18


@dataclass(frozen=True)
class Samples:
    """Samples of a training step; the first dimension of every tensor is n samples, a chunk of actions each.

    Attributes:
        inputs: the inputs of the policy.
        tensors: `actions` as the policy drew them, `old_logprobs` at the level of `algorithm.logprob_type`,
            `advantages`; `old_values` and `returns` with a value head; `mask` and `value_mask` if not everything
            counts.
        tokens: C and D of log-probabilities and entropies, as the policy returns them.
    """

    inputs: Inputs
    tensors: dict[str, Tensor]
    tokens: tuple[int, int]

    def __len__(self) -> int:
        return len(self.tensors["actions"])

    def to(self, device: torch.device) -> Samples:
        """Return the samples on a device."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            inputs={name: tensor.to(device) for name, tensor in self.inputs.items()},
            tensors={name: tensor.to(device) for name, tensor in self.tensors.items()},
        )

    def part(self, member: int, members: int) -> Samples:
        """Return every `members`-th sample from `member` on; all members get equally many.

        If the samples do not divide evenly, members that lack one get a masked sample.
        """
        if members == 1:
            return self
        mine = torch.arange(len(self))[member::members]
        padded = -(-len(self) // members) > len(mine)
        rows = torch.cat((mine, torch.zeros(1, dtype=torch.int64))) if padded else mine
        part = self._rows(rows)
        if padded:
            part = part.masked()
            for name in ("mask", "value_mask"):
                if name in part.tensors:
                    part.tensors[name][-1] = False
        return part

    def masked(self) -> Samples:
        """Return the samples with masks; by default everything counts."""
        tensors = dict(self.tensors)
        if "mask" not in tensors:
            # At the level of actions or chunks: the shape of `old_logprobs` without the tokens.
            tensors["mask"] = torch.ones(tensors["old_logprobs"].shape[:2], dtype=torch.bool)
            if "returns" in tensors:
                tensors["value_mask"] = torch.ones(tensors["returns"].shape[:1], dtype=torch.bool)
        return replace(self, tensors=tensors)

    def _rows(self, rows: Tensor | slice) -> Samples:
        return replace(
            self,
            inputs={name: tensor[rows] for name, tensor in self.inputs.items()},
            tensors={name: tensor[rows] for name, tensor in self.tensors.items()},
        )

    def batches(self, size: int) -> Iterator[Samples]:
        """Return all samples in random batches of `size`, drawn from torch's own generator."""
        for rows in torch.split(torch.randperm(len(self)), size):
            yield self._rows(rows)

    def microbatches(self, size: int) -> Iterator[Samples]:
        """Return the samples in order, in micro batches of `size`."""
        if size >= len(self):
            yield self
            return
        for start in range(0, len(self), size):
            yield self._rows(slice(start, start + size))


def build_samples(
    trajectories: RolloutChunks,
    algorithm: PolicyGradientConfig,
    group_size: int,
    reduce_sum: ReduceSum | None = None,
) -> tuple[Samples, dict[str, float]]:
    """Return samples with advantages, and metrics of them by their full names.

    If rewards or ratios are per chunk, or the model has one value per chunk, a chunk is one step: its reward is the sum
    of its actions' rewards, its advantage is relative to the value before it, and the discount is per chunk (Ren et
    al., "Diffusion policy policy optimization", arXiv 2409.00588, section 4.1). Ratios of actions or tokens then share
    the advantage of their chunk. Otherwise each action is a step, credited only with what follows it.

    Args:
        trajectories: T chunks of B environments, members of a group next to each other.
        algorithm: the section `algorithm`.
        group_size: environments that share a start.
        reduce_sum: sums a tensor over actors; None: a single actor.

    Raises:
        ValueError: the advantage needs values, and there are none.
    """
    steps = trajectories.steps
    chunk = steps["rewards"].shape[2]
    by_chunk = (
        # A ratio per chunk cannot be split: summed advantages of its actions would count what follows the chunk once
        # per action.
        algorithm.logprob_type == "chunk_level" or steps.get("values", steps["rewards"]).shape[2] != chunk
    )
    episodes, values = _episodes(trajectories, algorithm, by_chunk=by_chunk)
    inputs = algorithm.inputs
    settings = AdvantageSettings.of(inputs, reduce_sum) if reduce_sum else AdvantageSettings.of(inputs)
    advantage = get_advantage(algorithm.adv_type)
    options = checked_options(advantage, algorithm.options, "algorithm.options")
    settings = replace(settings, group_size=group_size, options=options)
    mask = episodes.mask
    if algorithm.settings.filter_rewards and mask is not None:
        mask = mask & _in_varied_groups(episodes.rewards, mask, group_size)
    # A custom function may rely on `group_size`.
    compares = algorithm.adv_type in GROUP_ADVANTAGES
    estimates = (estimate_present if compares else estimate)(advantage, episodes, settings)

    def samples(level: Tensor) -> Tensor:
        """Return [steps, B] as [n] or [n, C]."""
        return level.flatten() if by_chunk else fold_chunks(level, chunk).flatten(0, 1)

    tensors = {
        "actions": steps["actions"].flatten(0, 1),
        "old_logprobs": sum_to_level(steps["logprobs"].flatten(0, 1), algorithm.logprob_type),
        "advantages": samples(estimates.advantages),
    }
    counted = steps["valid"].flatten(0, 1)
    if algorithm.settings.filter_rewards and mask is not None:
        counted = counted & (samples(mask) if not by_chunk else samples(mask)[:, None])
    if algorithm.logprob_type == "chunk_level":
        counted = counted.any(dim=1)
    advantages = tensors["advantages"]
    mean, deviation = _moments(advantages[leading(counted, advantages.dim())], reduce_sum or alone)
    metrics = {
        "rollout/reward": mean_reward(steps),
        "rollout/advantages_mean": mean,
        "rollout/advantages_std": deviation,
        "rollout/observations_std": _spread(trajectories.inputs, steps["valid"].any(dim=2)),
    }
    if values is not None and estimates.returns is not None:
        tensors["old_values"] = samples(values[:-1]).reshape(len(tensors["actions"]), -1)
        tensors["returns"] = samples(estimates.returns).reshape(len(tensors["actions"]), -1)
        metrics["train/critic/explained_variance"] = explained_variance(values[:-1], estimates.returns, mask).item()
    if not bool(counted.all()):
        # Without masks the loss is simpler and faster.
        tensors["mask"] = counted
        if "returns" in tensors:
            tensors["value_mask"] = counted if counted.shape == tensors["returns"].shape else leading(counted, 1)
    observed = {name: tensor.flatten(0, 1) for name, tensor in trajectories.inputs.items()}
    return Samples(observed, tensors, (chunk, steps["logprobs"].shape[3])), metrics


def estimate_present(advantage: AdvantageFunction, episodes: Trajectories, settings: AdvantageSettings) -> Advantages:
    """Return advantages within groups without members of which no step counts, as after a failed simulator: a total
    reward of 0 would be compared. If one member is left, its advantage is 0.
    """
    mask = torch.ones_like(episodes.dones) if episodes.mask is None else episodes.mask
    kept = mask.any(dim=0).view(-1, settings.group_size)
    kept = kept & (kept.sum(dim=1, keepdim=True) > 1)
    if bool(kept.all()) or not bool(kept.any()):
        return estimate(advantage, episodes, settings)
    rows = kept.flatten()
    names = ("rewards", "dones", "values", "mask")
    columns = {name: None if (tensor := getattr(episodes, name)) is None else tensor[:, rows] for name in names}
    sizes = [size for size in integers(kept.sum(dim=1)) if size]
    part = estimate(advantage, replace(episodes, **columns, group_sizes=sizes), settings)

    def whole(tensor: Tensor) -> Tensor:
        return tensor.new_zeros(episodes.rewards.shape).index_copy(1, rows.nonzero()[:, 0], tensor)

    return Advantages(whole(part.advantages), None if part.returns is None else whole(part.returns))


def _in_varied_groups(rewards: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """Return which environments are in a group whose members have unequal total rewards, bool [B]; a member of which no
    step counts, see `estimate_present`, is like another one.
    """
    scores, present = total_rewards(rewards, mask).view(-1, group_size), mask.any(dim=0).view(-1, group_size)
    others = torch.where(present, scores, -torch.inf).amax(dim=1, keepdim=True).nan_to_num(neginf=0.0)
    return groups_that_vary(torch.where(present, scores, others).flatten(), group_size)


def mean_reward(steps: Mapping[str, Tensor]) -> float:
    """Return the summed valid rewards, averaged over environments with any valid reward."""
    valid = steps["valid"]
    environments = max(1, int(valid.any(dim=2).any(dim=0).sum()))
    return float(torch.where(valid, steps["rewards"], 0).sum()) / environments


def _moments(values: Tensor, reduce_sum: ReduceSum) -> tuple[float, float]:
    """Return mean and standard deviation of values [n] over all actors; 0 without values."""
    values = values.double()
    total, count = reduce_sum(torch.stack((values.sum(), values.new_tensor(len(values)))))
    mean = total / count.clamp(min=1)
    variance = reduce_sum((values - mean).square().sum()) / count.clamp(min=1)
    return float(mean), float(variance.sqrt())


def _spread(inputs: Inputs, counted: Tensor) -> float:
    """Return the largest standard deviation of any number of an observation, over some of the valid samples.

    Args:
        inputs: [T, B, ...] by name.
        counted: bool [T, B].
    """
    spreads: list[Tensor] = []
    places = counted.flatten().nonzero()[:, 0]
    for tensor in inputs.values() if len(places) else ():
        rows = tensor.flatten(0, 1)
        # Images are large, and a few suffice to show whether all are equal.
        few = rows[places[:: max(1, len(places) * max(1, rows[0].numel()) // _SPREAD_NUMBERS)]].flatten(1).float()
        spreads.append(few.std(dim=0, correction=0).amax())
    return float(torch.stack(spreads).amax()) if spreads else 0.0


def _episodes(
    trajectories: RolloutChunks, algorithm: PolicyGradientConfig, *, by_chunk: bool
) -> tuple[Trajectories, Tensor | None]:
    """Return rewards, ends and values at the level of the advantages, and the values alone."""
    steps = trajectories.steps
    rewards, ends = steps["rewards"], (steps["terminations"], steps["truncations"])
    level = "chunk_level" if by_chunk else "action_level"
    mask = steps["valid"].any(dim=2) if by_chunk else flatten_chunks(steps["valid"])
    values = None
    if trajectories.last is not None:
        last = trajectories.last[:, :1]
        finals = steps["finals"][..., :1].expand_as(rewards)
        rewards = bootstrap_rewards(rewards, *ends, finals, algorithm.gamma)
        # The value of a chunk is that of its first action, before any of its actions was executed.
        flat = steps["values"][..., 0] if by_chunk else flatten_chunks(steps["values"])
        values = torch.cat((flat, last.T))
    # The reward of a chunk is that of its valid actions.
    counted = torch.where(steps["valid"], rewards, 0)
    rewards, dones = rewards_to_level(counted, ends[0] | ends[1], level)
    return Trajectories(rewards=rewards, dones=dones, values=values, mask=mask), values


def bootstrap_rewards(
    rewards: Tensor,
    terminations: Tensor,
    truncations: Tensor,
    final_values: Tensor,
    gamma: float,
) -> Tensor:
    """Return rewards plus the value of the rest of an episode where it was truncated.

    For the value function, an episode does not end at its limit of steps: r_t + gamma V(final observation) estimates
    the rest (Pardo et al., "Time limits in reinforcement learning", arXiv 1712.00378).

    Args:
        rewards: float [T, ...].
        terminations: bool [T, ...], the task ended with this step.
        truncations: bool [T, ...], the episode was truncated after this step.
        final_values: float [T, ...], value of the observation in which the episode ended; anything elsewhere.
        gamma: discount per step.

    Returns:
        float [T, ...].
    """
    at = truncations & ~terminations
    # torch.where rather than a product: other entries may be NaN.
    return rewards + gamma * torch.where(at, final_values, 0)
