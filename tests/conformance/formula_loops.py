"""Formulas of losses and advantages as plain loops over lists, written from papers and from the pages of peers.

Nothing here uses the product or torch. A batch is a table of rows (sequences) of tokens; `mask` says what counts. Loops
of advantages take one row a trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

Table: TypeAlias = list[list[float]]
Mask: TypeAlias = list[list[bool]]
TokenLoss: TypeAlias = Callable[[float, float, int, int], float]


def aggregated(losses: Table, mask: Mask, how: str, *, empty_rows: bool = False) -> float:
    """Return the mean of token losses; `empty_rows` counts rows of which nothing counts, as TRL does."""
    rows = [
        [loss for loss, counts in zip(row, kept, strict=True) if counts] for row, kept in zip(losses, mask, strict=True)
    ]
    sums = [sum(row) for row in rows]
    number = len(rows) if empty_rows else sum(1 for row in rows if row)
    if how == "token-mean":
        return sum(sums) / sum(map(len, rows))
    if how == "seq-mean-token-mean":
        return sum(total / len(row) for total, row in zip(sums, rows, strict=True) if row) / number
    return sum(sums) / number / (len(losses[0]) if how == "seq-mean-token-sum-norm" else 1)


def ppo(ratio: float, advantage: float, low: float, high: float, bound: float | None) -> float:
    """PPO's clip (arXiv 1707.06347, eq. 7), with the dual clip of arXiv 1912.09729, eq. 5."""
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return -(max(objective, bound * advantage) if bound is not None and advantage < 0 else objective)


def divergence(policy: float, reference: float, estimator: str) -> float:
    """Estimators of http://joschu.net/blog/kl-approx.html."""
    d = policy - reference
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def soft_gate(ratio: float, advantage: float, tau_pos: float, tau_neg: float) -> float:
    """SAPO, arXiv 2511.20347, eq. 6."""
    tau = tau_pos if advantage > 0 else tau_neg
    return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def clipped_logs(new: Sequence[float], old: Sequence[float], advantage: float, low: float, high: float) -> float:
    """The mean of what GMPO keeps of the log-ratios of a sequence, arXiv 2507.20673, eq. 4."""
    logs = [n - o for n, o in zip(new, old, strict=True)]
    near = [min(max(value, -low), high) for value in logs]
    pick = min if advantage > 0 else max
    return sum(map(pick, logs, near)) / len(logs)


def value_error(value: float, old: float, target: float, clip: float | None, delta: float | None) -> float:
    """The clipped value loss of OpenAI's `ppo2`, with Huber's loss in the place of the square."""

    def error(estimate: float) -> float:
        e = abs(target - estimate)
        return e * e / 2 if delta is None or e <= delta else delta * (e - delta / 2)

    if clip is None:
        return error(value)
    return max(error(value), error(old + min(max(value - old, -clip), clip)))


def weight(
    old: Sequence[float], drawn: Sequence[float], at: int, level: str, cap: float | None, low: float, high: float
) -> float:
    """The truncated weight of a token for the policy that drew it, 0 where its ratio is not within [low, high]."""
    logs = [o - d for o, d in zip(old, drawn, strict=True)]
    of_weight, judged = (sum(logs), sum(logs) / len(logs)) if level == "sequence" else (logs[at], logs[at])
    if not low <= math.exp(judged) <= high:
        return 0.0
    return 1.0 if cap is None else min(math.exp(of_weight), cap)


# Advantages


def returns(rewards: Sequence[float], mask: Sequence[bool], gamma: float) -> list[float]:
    """Discounted returns; a token that does not count is passed over."""
    kept = [at for at, counts in enumerate(mask) if counts]
    result = [0.0] * len(rewards)
    for place, at in enumerate(kept):
        result[at] = sum(gamma**later * rewards[kept[place + later]] for later in range(len(kept) - place))
    return result


def gae(
    rewards: Sequence[float], values: Sequence[float], mask: Sequence[bool], gamma: float, decay: float
) -> list[float]:
    """GAE, arXiv 1506.02438, eq. 16, as the sum over differences; a token that does not count is passed over."""
    kept = [at for at, counts in enumerate(mask) if counts]
    following = [*(values[at] for at in kept[1:]), 0.0][: len(kept)]
    deltas = [rewards[at] + gamma * after - values[at] for at, after in zip(kept, following, strict=True)]
    result = [0.0] * len(rewards)
    for place, at in enumerate(kept):
        result[at] = sum((gamma * decay) ** later * deltas[place + later] for later in range(len(kept) - place))
    return result


def turns(mask: Sequence[bool]) -> list[list[int]]:
    """Return the runs of tokens that count."""
    runs: list[list[int]] = []
    for at, counts in enumerate(mask):
        if counts and at and mask[at - 1]:
            runs[-1].append(at)
        elif counts:
            runs.append([at])
    return runs


def turn_gae(
    rewards: Sequence[float], values: Sequence[float], mask: Sequence[bool], gamma: float, decay: float
) -> list[float]:
    """GAE whose steps are turns, arXiv 2505.11821."""
    runs = turns(mask)
    totals = [sum(rewards[at] for at in run) for run in runs]
    by_turn = gae(totals, [values[run[0]] for run in runs], [True] * len(runs), gamma, decay)
    result = [0.0] * len(rewards)
    for run, advantage in zip(runs, by_turn, strict=True):
        for at in run:
            result[at] = advantage
    return result


def deviation(numbers: Sequence[float], less: int = 1) -> float:
    """The standard deviation, divided by n - `less`."""
    mean = sum(numbers) / len(numbers)
    return math.sqrt(sum((number - mean) ** 2 for number in numbers) / (len(numbers) - less))


def normalized(table: Table, mask: Mask, epsilon: float = 1e-8, less: int = 1) -> Table:
    """Subtract the mean of what counts and divide by its deviation."""
    kept = [value for row, counted in zip(table, mask, strict=True) for value, c in zip(row, counted, strict=True) if c]
    mean, scale = sum(kept) / len(kept), deviation(kept, less) + epsilon
    return [
        [(value - mean) / scale if c else 0.0 for value, c in zip(row, counted, strict=True)]
        for row, counted in zip(table, mask, strict=True)
    ]


def relative(scores: Sequence[float], size: int, kind: str, epsilon: float = 1e-6) -> list[float]:
    """Scores within their groups: `grpo` (arXiv 2402.03300), `dr_grpo` (2503.20783), `rloo` (2402.14740)."""
    result: list[float] = []
    for first in range(0, len(scores), size):
        group = scores[first : first + size]
        mean = sum(group) / size
        for score in group:
            others = (sum(group) - score) / (size - 1)
            scale = deviation(group) + epsilon if kind == "grpo" else 1.0
            result.append(score - others if kind == "rloo" else (score - mean) / scale)
    return result
