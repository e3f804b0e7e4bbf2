"""Policies that change too much, too little, no longer explore, or get worse."""

from __future__ import annotations

from typing import Final

from rlinf_cli.why.facts import MetricColumn, RunFacts
from rlinf_cli.why.finding import FindingKind, RunFinding

_STEPS: Final = 5
_MANY_STEPS: Final = 10
_STALE_STEPS: Final = 15
_CLIPPED: Final = "train/actor/clip_fraction"
_KL: Final = "train/actor/approx_kl"
_ENTROPY: Final = "train/actor/entropy"
_MOST_CLIPPED: Final = 0.8
# Of log-probabilities of a step's samples, in nats: good runs have 0.0001 to 0.05.
_MOST_KL: Final = 1.0
# A share of successes that falls below this part of what it was has collapsed.
_COLLAPSED: Final = 0.25
_LEAST_PEAK: Final = 0.2
# Below these a policy does the same as its predecessor, and draws the same token nearly always.
_NO_CHANGE: Final = 1e-12
_NO_ENTROPY: Final = 0.01
_FALL: Final = 20.0
_GOOD: Final = 0.9
_BETTER: Final = 0.05


def everything_is_clipped(facts: RunFacts) -> RunFinding | None:
    """Find updates that leave the trust region at once."""
    clipped = facts.column(_CLIPPED)
    since = clipped.since(_MOST_CLIPPED, 1.0)
    if since is None or clipped.steps[-1] - since + 1 < _STEPS:
        return None
    return RunFinding(
        FindingKind.LEARNING,
        "all-clipped",
        "nearly all samples are clipped: the policy moves away from the one that drew them at the first update",
        (f"metrics.jsonl: `{_CLIPPED}` is {clipped.values[-1]:.2f} in step {clipped.steps[-1]}",),
        (
            "lower `actor.optim.lr` or `algorithm.update_epoch`; where it is so from the first step on, the"
            " log-probabilities of rollout and training differ",
        ),
        step=since,
    )


def policy_jumps(facts: RunFacts) -> RunFinding | None:
    """Find updates after which the policy hardly gives its own samples any more."""
    divergence = facts.column(_KL)
    since = divergence.since(_MOST_KL, float("inf"))
    if since is None or divergence.steps[-1] - since + 1 < _STEPS:
        return None
    return RunFinding(
        FindingKind.LEARNING,
        "policy-jumps",
        "each step moves the policy far away from the one that drew its samples",
        (
            f"metrics.jsonl: `{_KL}` is {divergence.values[-1]:.3g} in step {divergence.steps[-1]}; it is below 0.1 in"
            " good runs",
        ),
        (
            "lower `actor.optim.lr` or `algorithm.update_epoch`, or bound gradients by `actor.optim.clip_grad`; a"
            " checkpoint before that step is still good",
        ),
        step=since,
    )


def reward_collapsed(facts: RunFacts) -> RunFinding | None:
    """Find a policy that solved tasks and no longer does."""
    name = next((name for name in ("rollout/correct", "env/success_once") if name in facts.columns), None)
    column = facts.column(name or "")
    if name is None or len(column) < 2 * _MANY_STEPS:
        return None
    means = [sum(column.values[end - _STEPS : end]) / _STEPS for end in range(_STEPS, len(column) + 1)]
    best = max(means)
    since = column.since(0.0, _COLLAPSED * best)
    if best < _LEAST_PEAK or since is None or column.steps[-1] - since + 1 < _STEPS:
        return None
    at = column.steps[means.index(best) + _STEPS - 1]
    return RunFinding(
        FindingKind.LEARNING,
        "reward-collapsed",
        f"the policy solved {best:.0%} of its tasks until step {at}, and {column.values[-1]:.0%} now",
        (f"metrics.jsonl: `{name}` is below {_COLLAPSED * best:.2g} since step {since}",),
        (
            f"look at the report around step {since}: at `{_ENTROPY}`, `{_KL}` and `train/actor/grad_norm`; go back to"
            f" a checkpoint of step {at} or before with a smaller `actor.optim.lr`",
        ),
        step=since,
    )


def nothing_is_clipped(facts: RunFacts) -> RunFinding | None:
    """Find several updates in each step that leave the policy as it was."""
    clipped, divergence = facts.column(_CLIPPED).last(_MANY_STEPS), facts.column(_KL).last(_MANY_STEPS)
    several = max(facts.number("algorithm.update_epoch") or 1, facts.number("algorithm.n_minibatches") or 1) > 1
    if not several or len(clipped) < _MANY_STEPS or max(clipped.values) > 0:
        return None
    if not len(divergence) or max(map(abs, divergence.values)) > _NO_CHANGE:
        return None
    return RunFinding(
        FindingKind.LEARNING,
        "policy-does-not-change",
        "the updates of a step do not change the policy: it is the same after them",
        (
            f"metrics.jsonl: `{_CLIPPED}` is 0 and `{_KL}` at most {max(map(abs, divergence.values)):.1g} from step"
            f" {clipped.steps[0]} to {clipped.steps[-1]}, with several updates in each",
        ),
        ("raise `actor.optim.lr`; look whether the loss has a gradient (`train/actor/grad_norm`)",),
        step=clipped.steps[0],
    )


def entropy_collapsed(facts: RunFacts) -> RunFinding | None:
    """Find a policy that draws the same answers always, though they are not good."""
    # A step without samples has an entropy of 0, which says nothing.
    every = facts.column(_ENTROPY)
    entropies = every.without(0.0)
    since = entropies.since(0.0, _NO_ENTROPY)
    # An entropy below 0 is that of a continuous action.
    if since is None or min(entropies.values) < 0 or every.steps[-1] - since + 1 < _STEPS:
        return None
    begin = entropies.values[0]
    if begin < max(_NO_ENTROPY, _FALL * entropies.values[-1]) or _does_well(facts, since):
        return None
    return RunFinding(
        FindingKind.LEARNING,
        "entropy-collapsed",
        "the policy no longer explores: its entropy has collapsed",
        (
            f"metrics.jsonl: `{_ENTROPY}` fell from {begin:.3g} to {entropies.values[-1]:.3g}, and is"
            f" below {_NO_ENTROPY:g} since step {since}",
        ),
        (
            "go back to a checkpoint before that step with a smaller `actor.optim.lr`, an `algorithm.entropy_bonus`, a"
            " larger `algorithm.clip_ratio_high` or an `algorithm.kl_beta`",
        ),
        step=since,
    )


def staleness_at_bound(facts: RunFacts) -> RunFinding | None:
    """Find that all samples are as old as they may be in a run whose rewards do not rise meanwhile."""
    bound = facts.number("runner.max_staleness") or 0
    ages = facts.column("rollout/staleness_mean", "rollout/staleness")
    since = ages.since(bound - 0.01, float("inf"))
    # With a bound of 1 it is so in every run whose rollouts go on during training.
    if bound < 2 or since is None or ages.steps[-1] - since + 1 < _STALE_STEPS or _rises(facts, since):
        return None
    return RunFinding(
        FindingKind.LEARNING,
        "staleness-at-bound",
        f"all samples are {bound:.0f} versions old, the most that `runner.max_staleness` allows: generation waits for"
        " training",
        (f"metrics.jsonl: the staleness is {ages.values[-1]:.2f} on the mean since step {since}",),
        (
            "lower `runner.max_staleness`, which costs no time as long as rollouts are ready before they are needed, or"
            " give training more of the machines",
        ),
        step=since,
    )


def _rises(facts: RunFacts, since: int) -> bool:
    """Return whether rewards are higher in the last third of the steps since one than in the first third."""
    rewards = facts.column("rollout/correct", "rollout/reward", "env/success_once", "env/return")
    values = [value for at, value in zip(rewards.steps, rewards.values, strict=True) if at >= since]
    third = len(values) // 3
    if not third:
        return False
    before, after = sum(values[:third]) / third, sum(values[-third:]) / third
    return after - before > _BETTER * max(abs(before), abs(after))


def _does_well(facts: RunFacts, since: int) -> bool:
    """Return whether rewards are high, or better than before the policy became certain."""
    rewards = facts.column("rollout/correct", "rollout/reward", "env/success_once", "env/return")
    before, after = _mean_until(rewards, since), rewards.values[-1] if len(rewards) else 0.0
    return after >= _GOOD or after - before > _BETTER * max(abs(before), abs(after))


def _mean_until(column: MetricColumn, step: int) -> float:
    values = [value for at, value in zip(column.steps, column.values, strict=True) if at < step]
    return sum(values) / len(values) if values else 0.0


RULES: Final = (
    everything_is_clipped,
    policy_jumps,
    nothing_is_clipped,
    entropy_collapsed,
    reward_collapsed,
    staleness_at_bound,
)
