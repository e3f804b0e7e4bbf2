"""Advantages: how much better an action was than expected.

The functions named in `algorithm.adv_type` take `Trajectories` and `AdvantageSettings`, and call plain functions of
tensors. Time comes first: [T, ...] is T steps of any number of trajectories. `dones[t]` says that the episode ended
with step t (the d_{t+1} of the formulas), so that step t + 1 belongs to another episode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import Tensor

from rlinf_core.algorithms.loss_inputs import broadcast_mask

GROUP_EPSILON = 1e-6
NORMALIZE_EPSILON = 1e-8
# Scores of a group that differ by less than this fraction of the largest are equal: float32 rewards have 7 digits.
SAME_SCORE = 1e-6


def _identity(value: Tensor) -> Tensor:
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectories:
    """The input of advantages: T steps of B trajectories. Members of a group are neighbors in B.

    Attributes:
        rewards: float [T, B].
        dones: bool [T, B], whether the episode ended with this step.
        values: float [T + 1, B], of the observation before each step and of the one after the last; None without a
            value head.
        mask: bool [T, B], which steps count; None: all.
        kl: float [T, B], KL from the reference at each step, to be subtracted from the rewards; None without a
            reference, or if the loss has that term. For `distillation`: KL from the teacher.
        group_sizes: the sizes of the groups in order, if some have lost members; None: all have `group_size`.
    """

    rewards: Tensor
    dones: Tensor
    values: Tensor | None = None
    mask: Tensor | None = None
    kl: Tensor | None = None
    group_sizes: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """The keys of `algorithm` that advantages depend on, and the reduction over ranks.

    Attributes:
        options: `algorithm.options`, as the advantage's own pydantic model or a dictionary (`algorithms.options`).
        reduce_sum: sums a tensor over the ranks that share a step, such as an all-reduce; the identity for one rank.
    """

    gamma: float = 1.0
    gae_lambda: float = 1.0
    group_size: int = 1
    normalize_advantages: bool = True
    kl_beta: float = 0.0
    options: Any = field(default_factory=dict[str, Any])
    reduce_sum: Callable[[Tensor], Tensor] = _identity

    @classmethod
    def of(cls, config: object, reduce_sum: Callable[[Tensor], Tensor] = _identity) -> AdvantageSettings:
        """Return the settings from a section `algorithm`; a key that the section lacks keeps its default."""
        names = [field.name for field in fields(cls) if hasattr(config, field.name)]
        return cls(**{name: getattr(config, name) for name in names}, reduce_sum=reduce_sum)


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages, and the returns that values learn (None without values); both float [T, B]."""

    advantages: Tensor
    returns: Tensor | None = None


AdvantageFunction = Callable[[Trajectories, AdvantageSettings], Advantages]


def estimate(function: AdvantageFunction, trajectories: Trajectories, settings: AdvantageSettings) -> Advantages:
    """Call an advantage function, which may be custom, and check its result.

    Raises:
        TypeError: the result is not `Advantages` of floating-point tensors.
        ValueError: the shape of a tensor differs from that of the rewards.
    """
    result = cast("object", function(trajectories, settings))
    name, shape = getattr(function, "__name__", str(function)), trajectories.rewards.shape
    if not isinstance(result, Advantages):
        raise TypeError(f"the advantage function `{name}` returned a `{type(result).__name__}`; expected `Advantages`")
    for what, tensor in (("advantages", result.advantages), ("returns", result.returns)):
        if what == "returns" and tensor is None:
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else f"a `{type(tensor).__name__}`"
            raise TypeError(f"`{what}` of the advantage function `{name}` is {kind}; expected floating-point numbers")
        if tensor.shape != shape:
            raise ValueError(
                f"`{what}` of the advantage function `{name}` has the shape {list(tensor.shape)}; expected"
                f" {list(shape)}, that of `rewards`: steps come first, then trajectories"
            )
    return result


def gae(trajectories: Trajectories, settings: AdvantageSettings) -> Advantages:
    """Compute GAE advantages; returns are advantages + values, before advantages are normalized.

    Raises:
        ValueError: there are no values.
    """
    values = _values_of(trajectories, "gae")
    mask, gamma = trajectories.mask, settings.gamma
    rewards = _rewards(trajectories, settings)
    advantages = gae_advantages(rewards, values, trajectories.dones, gamma, settings.gae_lambda, mask)
    return _with_values(advantages, advantages + values[:-1], trajectories, settings)


def turn_gae(trajectories: Trajectories, settings: AdvantageSettings) -> Advantages:
    """Compute GAE over turns: a turn is one action, and its tokens share its advantage and its return.

    A turn is a run of steps that count; steps that do not count, such as the output of a tool, or the end of an
    episode separate turns. The turn's reward is the sum over its steps, and its value that of its first step: Wei et
    al., "Reinforcing multi-turn reasoning in LLM agents via turn-level reward design", arXiv 2505.11821. An answer
    without tools is one turn, whose advantage is its total reward minus the value of the prompt.

    Raises:
        ValueError: there are no values.
    """
    values = _values_of(trajectories, "turn_gae")
    rewards, dones = _rewards(trajectories, settings), trajectories.dones
    mask = broadcast_mask(trajectories.mask, rewards)
    continues = torch.zeros_like(mask)
    continues[1:] = mask[1:] & mask[:-1] & ~dones[:-1]
    starts = mask & ~continues
    advantages = torch.zeros_like(rewards)
    after, total, following = torch.zeros_like(rewards[0]), torch.zeros_like(rewards[0]), values[-1]
    for step in range(len(rewards) - 1, -1, -1):
        goes_on = 1 - dones[step].to(values.dtype)
        after, following = after * goes_on, following * goes_on
        total = total + torch.where(mask[step], rewards[step], 0)
        difference = total + settings.gamma * following - values[step]
        delta = difference + settings.gamma * settings.gae_lambda * after
        begins = starts[step]
        advantages[step] = torch.where(begins, delta, 0)
        after, following = torch.where(begins, delta, after), torch.where(begins, values[step], following)
        total = torch.where(begins, 0, total)
    returns = torch.where(starts, advantages + values[:-1], 0)
    for step in range(1, len(rewards)):
        for tensor in (advantages, returns):
            tensor[step] = torch.where(continues[step], tensor[step - 1], tensor[step])
    return _with_values(advantages, returns, trajectories, settings)


def grpo(trajectories: Trajectories, settings: AdvantageSettings) -> Advantages:
    """Compute group-relative advantages of total rewards, the same for every step that counts, else 0."""
    return _by_group(trajectories, settings, group_advantages)


def dr_grpo(trajectories: Trajectories, settings: AdvantageSettings) -> Advantages:
    """Compute group-relative advantages that are not divided by the standard deviation: `group_differences`."""
    return _by_group(trajectories, settings, group_differences)


def rloo(trajectories: Trajectories, settings: AdvantageSettings) -> Advantages:
    """Compute total rewards minus the mean of the group's other members: `leave_one_out_advantages`."""
    return _by_group(trajectories, settings, leave_one_out_advantages)


def reinforce_pp(trajectories: Trajectories, settings: AdvantageSettings) -> Advantages:
    """Compute REINFORCE++ (arXiv 2501.03262): discounted returns minus the KL, normalized over the batch."""
    return _reinforce(trajectories, settings, trajectories.rewards)


def reinforce_pp_baseline(trajectories: Trajectories, settings: AdvantageSettings) -> Advantages:
    """Compute REINFORCE++ with the mean total reward of the group as baseline.

    The baseline is subtracted from the reward of each trajectory's last step that counts, and so from every return.
    """
    rewards = trajectories.rewards
    mask = broadcast_mask(trajectories.mask, rewards)
    scores = total_rewards(rewards, mask).to(rewards.dtype)
    baseline = _within_groups(trajectories, settings, scores, _group_means)
    steps = torch.arange(len(rewards), device=rewards.device)[:, None]
    last = torch.where(mask, steps, -1).amax(dim=0)
    return _reinforce(trajectories, settings, torch.where(steps == last, rewards - baseline, rewards))


def distillation(trajectories: Trajectories, settings: AdvantageSettings) -> Advantages:
    """Compute log teacher - log policy at every step that counts; with `normalize_advantages` minus its mean.

    On-policy distillation: the gradient of the reverse KL(policy || teacher) of each token given the tokens before it,
    as in Agarwal et al., "On-policy distillation of language models" (GKD), arXiv 2306.13649, eq. 4. It is a policy
    gradient that ignores later tokens, as in Lu et al., "On-policy distillation", Thinking Machines Lab, 2025. Rewards
    are ignored. The mean over all steps is a baseline, which keeps the expected gradient and lowers its variance.

    Raises:
        ValueError: `trajectories.kl` is None.
    """
    if trajectories.kl is None:
        raise ValueError("`adv_type: distillation` needs the divergence from a teacher")
    mask = broadcast_mask(trajectories.mask, trajectories.rewards)
    advantages = torch.where(mask, -trajectories.kl, 0)
    if settings.normalize_advantages:
        total, count = settings.reduce_sum(torch.stack((advantages.sum(), mask.sum().to(advantages.dtype))))
        advantages = torch.where(mask, advantages - total / count.clamp(min=1), 0)
    return Advantages(advantages)


def _reinforce(trajectories: Trajectories, settings: AdvantageSettings, rewards: Tensor) -> Advantages:
    mask = broadcast_mask(trajectories.mask, rewards)
    rewards = _less_divergence(rewards, trajectories, settings)
    returns = discounted_returns(torch.where(mask, rewards, 0), trajectories.dones, settings.gamma, mask)
    if settings.normalize_advantages:
        returns = normalize(returns, mask, settings.reduce_sum)
    return Advantages(torch.where(mask, returns, 0))


def _by_group(
    trajectories: Trajectories, settings: AdvantageSettings, compare: Callable[[Tensor, int], Tensor]
) -> Advantages:
    """Return as every counted step's advantage the result of `compare` on its group's total rewards."""
    rewards = _rewards(trajectories, settings)
    mask = broadcast_mask(trajectories.mask, rewards)
    relative = _within_groups(trajectories, settings, total_rewards(rewards, mask), compare).to(rewards.dtype)
    return Advantages(torch.where(mask, relative, 0))


def _within_groups(
    trajectories: Trajectories, settings: AdvantageSettings, scores: Tensor, compare: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Apply `compare` to the scores of each group; return float [B]."""
    sizes = trajectories.group_sizes
    if sizes is None:
        return compare(scores, settings.group_size)
    return torch.cat([compare(part, len(part)) for part in torch.split(scores, list(sizes))])


def _group_means(scores: Tensor, group_size: int) -> Tensor:
    means = _groups(scores, group_size).mean(dim=1, keepdim=True)
    return means.expand(-1, group_size).reshape(scores.shape)


def _rewards(trajectories: Trajectories, settings: AdvantageSettings) -> Tensor:
    return _less_divergence(trajectories.rewards, trajectories, settings)


def _less_divergence(rewards: Tensor, trajectories: Trajectories, settings: AdvantageSettings) -> Tensor:
    return rewards if trajectories.kl is None else rewards - settings.kl_beta * trajectories.kl


def _values_of(trajectories: Trajectories, name: str) -> Tensor:
    if trajectories.values is None:
        raise ValueError(f"`adv_type: {name}` needs values: the model has no value head")
    return trajectories.values


def _with_values(
    advantages: Tensor, returns: Tensor, trajectories: Trajectories, settings: AdvantageSettings
) -> Advantages:
    if settings.normalize_advantages:
        advantages = normalize(advantages, trajectories.mask, settings.reduce_sum)
    return Advantages(advantages, returns)


def discounted_returns(rewards: Tensor, dones: Tensor, gamma: float, mask: Tensor | None = None) -> Tensor:
    """Return G_t = r_t + gamma (1 - d_{t+1}) G_{t+1}, with G = 0 after the last step.

    Args:
        rewards: float [T, ...].
        dones: bool [T, ...].
        gamma: the discount per step.
        mask: bool [T, ...]; a step that does not count is skipped, as in `gae_advantages`: it adds no discount, and
            its return is 0. None: every step counts.

    Returns:
        float [T, ...].
    """
    returns = torch.empty_like(rewards)
    after = torch.zeros_like(rewards[0])
    for step in range(len(rewards) - 1, -1, -1):
        after = torch.where(dones[step], 0, after)
        total = rewards[step] + gamma * after
        if mask is None:
            returns[step] = after = total
        else:
            returns[step] = torch.where(mask[step], total, 0)
            after = torch.where(mask[step], total, after)
    return returns


def gae_advantages(
    rewards: Tensor, values: Tensor, dones: Tensor, gamma: float, gae_lambda: float, mask: Tensor | None = None
) -> Tensor:
    """Return A_t = delta_t + gamma lambda (1 - d_{t+1}) A_{t+1}, delta_t = r_t + gamma V_{t+1} (1 - d_{t+1}) - V_t.

    Schulman et al., "High-dimensional continuous control using generalized advantage estimation", arXiv 1506.02438,
    eq. 16. The rewards include the final values of truncated episodes (`bootstrap_rewards`).

    Args:
        rewards: float [T, ...].
        values: float [T + 1, ...].
        dones: bool [T, ...].
        gamma: the discount per step.
        gae_lambda: the decay per step of later differences.
        mask: bool [T, ...]; a step that does not count is skipped: the step before it leads to the step after it, its
            reward and value are ignored, and its advantage is 0. None: every step counts.

    Returns:
        float [T, ...].
    """
    goes_on = 1 - dones.to(values.dtype)
    advantages = torch.zeros_like(rewards)
    after, following = torch.zeros_like(rewards[0]), values[-1]
    for step in range(len(rewards) - 1, -1, -1):
        after, following = after * goes_on[step], following * goes_on[step]
        delta = rewards[step] + gamma * following - values[step] + gamma * gae_lambda * after
        if mask is None:
            advantages[step] = after = delta
            following = values[step]
        else:
            counts = mask[step].bool()
            advantages[step] = torch.where(counts, delta, 0)
            after, following = torch.where(counts, delta, after), torch.where(counts, values[step], following)
    return advantages


def total_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Return the score of each trajectory, float64 [B]: the sum of those rewards [T, B] that count."""
    return torch.where(mask, rewards, 0).sum(dim=0, dtype=torch.float64)


def group_advantages(scores: Tensor, group_size: int) -> Tensor:
    """Return (score - group mean) / (group std + 1e-6); exactly 0 if a group's scores are equal.

    Shao et al., "DeepSeekMath", arXiv 2402.03300, section 4.1.2. The std is unbiased. Scores that differ only by
    rounding count as equal: divided by so small a std, rounding errors would be trained on.

    Args:
        scores: float [B], the members of a group adjacent.
        group_size: 2 or more; divides B.

    Returns:
        float [B].

    Raises:
        ValueError: the number of scores is not a multiple of `group_size`, or groups have one member.
    """
    groups = _compared(scores, group_size)
    centered = groups - groups.mean(dim=1, keepdim=True)
    relative = centered / (groups.std(dim=1, keepdim=True, correction=1) + GROUP_EPSILON)
    return torch.where(_varies(groups)[:, None], relative, 0).reshape(scores.shape)


def group_differences(scores: Tensor, group_size: int) -> Tensor:
    """Return score - group mean; exactly 0 if a group's scores are equal.

    Liu et al., "Understanding R1-Zero-like training" (Dr. GRPO), arXiv 2503.20783: without the division by the std,
    prompts that are nearly always or nearly never solved weigh no more than others. Arguments as for
    `group_advantages`.
    """
    groups = _compared(scores, group_size)
    centered = groups - groups.mean(dim=1, keepdim=True)
    return torch.where(_varies(groups)[:, None], centered, 0).reshape(scores.shape)


def leave_one_out_advantages(scores: Tensor, group_size: int) -> Tensor:
    """Return score - mean of the group's other members; exactly 0 if a group's scores are equal.

    Ahmadian et al., "Back to basics" (RLOO), arXiv 2402.14740. Arguments as for `group_advantages`.
    """
    return group_differences(scores, group_size) * (group_size / (group_size - 1))


def groups_that_vary(scores: Tensor, group_size: int) -> Tensor:
    """Return which trajectories are in a group with unequal scores, bool [B]: `filter_rewards` keeps those.

    Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2). Arguments as for `group_advantages`.
    """
    return _varies(_groups(scores, group_size)).repeat_interleave(group_size)


def varies(scores: Sequence[float]) -> bool:
    """Return whether the scores of a group are unequal in float32, the type of rewards."""
    if not scores:
        return False
    return bool(_varies(torch.tensor([list(scores)], dtype=torch.float32).double())[0])


def normalize(values: Tensor, mask: Tensor | None, reduce_sum: Callable[[Tensor], Tensor] = _identity) -> Tensor:
    """Return (value - mean) / (std + 1e-8), with mean and unbiased std over the counted values of all ranks.

    Args:
        values: float, any shape.
        mask: bool of that shape, which values count for mean and std; None: all.
        reduce_sum: sums a tensor over ranks.

    Returns:
        The shape and dtype of `values`; only the mean is subtracted if fewer than two values count.
    """
    counted = values.double() if mask is None else values.double()[mask.bool()]
    total = reduce_sum(torch.stack((counted.new_tensor(counted.numel()), counted.sum())))
    count, mean = total[0], total[1] / total[0].clamp(min=1)
    squares = reduce_sum((counted - mean).square().sum())
    deviation = torch.where(count > 1, (squares / (count - 1).clamp(min=1)).sqrt(), torch.ones_like(squares))
    return ((values - mean) / (deviation + NORMALIZE_EPSILON)).to(values.dtype)


def _compared(scores: Tensor, group_size: int) -> Tensor:
    if group_size < 2:
        raise ValueError(f"a group needs two members to be compared, `group_size` is {group_size}")
    return _groups(scores, group_size)


def _groups(scores: Tensor, group_size: int) -> Tensor:
    if scores.numel() % group_size:
        raise ValueError(f"{scores.numel()} trajectories are not a multiple of the group size {group_size}")
    return scores.reshape(-1, group_size)


def _varies(groups: Tensor) -> Tensor:
    return groups.amax(dim=1) - groups.amin(dim=1) > SAME_SCORE * groups.abs().amax(dim=1)
