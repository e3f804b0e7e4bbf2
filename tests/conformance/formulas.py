"""Our losses and advantages against plain loops over the formulas of papers and peers, on random numbers by seed.

`python -m tests.conformance.formulas` prints the counts; `--write` stores them. A comparison is one formula with one
choice of settings on one kind of mask; it is `equal`, or `explained` where a peer defines the formula otherwise and
ours follows from theirs by that difference.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlinf_core.algorithms.advantages import AdvantageSettings, Trajectories
from rlinf_core.algorithms.loss_inputs import LossInputs, LossSettings
from rlinf_core.algorithms.losses import value_loss
from rlinf_core.algorithms.options import get_advantage, get_policy_loss
from tests.conformance import formula_loops as loops

COUNTS = Path(__file__).with_name("formula_counts.json")
# The product's tolerance against peers was 2e-6 in float32; these are float64.
CLOSE, CLOSE_GRADIENT = 1e-9, 2e-6
DRAWS = 6
ROWS, TOKENS, GROUP = 4, 6, 2
MASKS = ("full", "ragged", "gaps", "empty row")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_STEP = 1e-6


class Comparison(NamedTuple):
    """One formula against one loop: `differs` returns the largest difference of value and gradient for a batch."""

    name: str
    mask: str
    differs: Callable[[Any], tuple[float, float]]
    explained: str = ""


def batch(seed: int, kind: str) -> Any:
    """Return random tables of lists, and the mask of a kind."""
    draw = random.Random(seed)

    def table(scale: float = 0.3, shift: float = 0.0) -> list[list[float]]:
        return [[draw.gauss(shift, scale) for _ in range(TOKENS)] for _ in range(ROWS)]

    old = table(shift=-1.0)
    near = [[value + draw.gauss(0, 0.3) for value in row] for row in old]
    mask = [[True] * TOKENS for _ in range(ROWS)]
    for row in mask:
        length = TOKENS if kind == "full" else draw.randint(3, TOKENS)
        row[length:] = [False] * (TOKENS - length)
        if kind == "gaps":
            row[draw.randint(1, length - 2)] = False
    if kind == "empty row":
        mask[draw.randrange(ROWS)] = [False] * TOKENS
    return SimpleNamespace(
        mask=mask,
        old_logprobs=old,
        logprobs=near,
        ref_logprobs=table(shift=-1.0),
        behaviour_logprobs=[[value + draw.gauss(0, 0.2) for value in row] for row in old],
        advantages=table(1.0),
        scores=[draw.gauss(0, 1) for _ in range(ROWS)],
        old_values=table(1.0),
        values=table(1.0),
        returns=table(1.0),
        rewards=table(1.0),
        kl=table(),
    )


def _tensor(table: Any) -> Tensor:
    kind = torch.bool if isinstance(table[0][0], bool) else torch.float64
    return torch.tensor(table, dtype=kind)


def _compared(
    b: Any, key: str, ours: Callable[[Tensor], Tensor], loop: Callable[[list[list[float]]], float]
) -> tuple[float, float]:
    """Return the differences of a loss and of its gradient by a table, the loop's by small steps to both sides."""
    table = getattr(b, key)
    learned = _tensor(table).requires_grad_()
    loss = ours(learned)
    (gradient,) = torch.autograd.grad(loss, learned)
    worst, here = 0.0, loop(table)
    for row, token in product(range(ROWS), range(TOKENS)):
        slopes: list[float] = []
        for step in (_STEP, -_STEP):
            moved = [list(values) for values in table]
            moved[row][token] += step
            slopes.append((loop(moved) - here) / step)
        # Between the slopes to both sides, which differ where a clip begins.
        value = gradient[row, token].item()
        worst = max(worst, min(slopes) - value, value - max(slopes))
    return abs(loss.item() - here), worst


def _policy(name: str, mask: str, loop: Callable[[Any, list[list[float]], int, int], float], **keys: Any) -> Comparison:
    """Return the comparison of a policy loss; `loop(b, logprobs, row, token)` is the loss of a token."""
    settings = LossSettings(**{"clip_ratio_c": None, "entropy_bonus": 0.0, **keys})

    def differs(b: Any) -> tuple[float, float]:
        if name in ("gspo", "gmpo"):
            b.advantages = [[score] * TOKENS for score in b.scores]
        values = {key: _tensor(getattr(b, key)) for key in ("old_logprobs", "advantages", "behaviour_logprobs", "mask")}
        if settings.kl_beta:
            values["ref_logprobs"] = _tensor(b.ref_logprobs)

        def whole(logprobs: list[list[float]]) -> float:
            losses = [
                [loop(b, logprobs, row, token) if b.mask[row][token] else 0.0 for token in range(TOKENS)]
                for row in range(ROWS)
            ]
            return loops.aggregated(losses, b.mask, settings.loss_agg_func)

        ours = get_policy_loss(name)
        return _compared(b, "logprobs", lambda table: ours(LossInputs(logprobs=table, **values), settings).loss, whole)

    return Comparison(f"{name} {keys}", mask, differs)


def _kept(b: Any, table: list[list[float]], row: int) -> list[float]:
    return [value for value, counts in zip(table[row], b.mask[row], strict=True) if counts]


def _ratio(b: Any, logprobs: list[list[float]], row: int, token: int) -> float:
    return math.exp(logprobs[row][token] - b.old_logprobs[row][token])


def _weighted(level: str, cap: float | None, low: float = 0.0, high: float = math.inf) -> Any:
    def loop(b: Any, logprobs: list[list[float]], row: int, token: int) -> float:
        at = sum(b.mask[row][:token])
        old, drawn = _kept(b, b.old_logprobs, row), _kept(b, b.behaviour_logprobs, row)
        factor = loops.weight(old, drawn, at, level, cap, low, high)
        return factor * loops.ppo(_ratio(b, logprobs, row, token), b.advantages[row][token], 0.2, 0.28, None)

    return loop


def _of_sequence(kind: str, low: float, high: float) -> Any:
    def loop(b: Any, logprobs: list[list[float]], row: int, token: int) -> float:
        new, old, advantage = _kept(b, logprobs, row), _kept(b, b.old_logprobs, row), b.scores[row]
        if kind == "gmpo":
            return -advantage * math.exp(loops.clipped_logs(new, old, advantage, low, high))
        mean = sum(n - o for n, o in zip(new, old, strict=True)) / len(new)
        return loops.ppo(math.exp(mean), advantage, low, high, None)

    return loop


def _cispo(low: float, high: float) -> Any:
    """CISPO, arXiv 2506.13585, eq. 4: the weight is that of the batch, whatever the log-probability becomes."""

    def loop(b: Any, logprobs: list[list[float]], row: int, token: int) -> float:
        fixed = min(max(_ratio(b, b.logprobs, row, token), 1 - low), 1 + high)
        return -fixed * b.advantages[row][token] * logprobs[row][token]

    return loop


def policy_losses(mask: str) -> Iterator[Comparison]:
    """Yield the comparisons of policy losses on one kind of mask."""
    for how, bound in product(AGGREGATIONS, (None, 1.5)):

        def clip(b: Any, logprobs: Any, row: int, token: int, bound: float | None = bound) -> float:
            return loops.ppo(_ratio(b, logprobs, row, token), b.advantages[row][token], 0.2, 0.28, bound)

        yield _policy("actor", mask, clip, loss_agg_func=how, clip_ratio_high=0.28, clip_ratio_c=bound)
    for how, estimator in product(AGGREGATIONS[::2], ("k1", "k2", "k3")):

        def near(b: Any, logprobs: Any, row: int, token: int, estimator: str = estimator) -> float:
            kl = loops.divergence(logprobs[row][token], b.ref_logprobs[row][token], estimator)
            return 0.05 * kl + loops.ppo(_ratio(b, logprobs, row, token), b.advantages[row][token], 0.2, 0.2, None)

        yield _policy("actor", mask, near, loss_agg_func=how, kl_beta=0.05, kl_penalty=estimator)
    for level in ("token", "sequence"):
        keys: dict[str, Any] = {"clip_ratio_high": 0.28, "correction_level": level}
        yield _policy("actor", mask, _weighted(level, 1.1), tis_cap=1.1, **keys)
        yield _policy("decoupled_actor", mask, _weighted(level, math.inf), **keys)
        yield _policy("decoupled_actor", mask, _weighted(level, 1.1), tis_cap=1.1, **keys)
        bounds = {"reject_ratio_low": 0.9, "reject_ratio_high": 1.2}
        yield _policy("actor", mask, _weighted(level, None, 0.9, 1.2), **bounds, **keys)
        yield _policy("actor", mask, _weighted(level, 1.1, 0.9, 1.2), tis_cap=1.1, **bounds, **keys)
    for name, (low, high) in product(("gspo", "gmpo"), ((0.05, 0.08), (0.4, 0.4))):
        keys = {"loss_agg_func": "seq-mean-token-mean", "clip_ratio_low": low, "clip_ratio_high": high}
        yield _policy(name, mask, _of_sequence(name, low, high), **keys)
    for how, low in product(AGGREGATIONS[::2], (1.0, 0.2)):
        yield _policy("cispo", mask, _cispo(low, 0.28), loss_agg_func=how, clip_ratio_low=low, clip_ratio_high=0.28)
    for how, (pos, neg) in product(AGGREGATIONS[::2], ((1.0, 1.05), (2.0, 3.0))):

        def gate(b: Any, logprobs: Any, row: int, token: int, pos: float = pos, neg: float = neg) -> float:
            return loops.soft_gate(_ratio(b, logprobs, row, token), b.advantages[row][token], pos, neg)

        yield _policy("sapo", mask, gate, loss_agg_func=how, tau_pos=pos, tau_neg=neg)


def value_losses(mask: str) -> Iterator[Comparison]:
    """Yield the comparisons of value losses on one kind of mask."""
    for clip, delta in product((None, 0.2, 0.5), (None, 0.5)):
        settings = LossSettings(value_clip=clip, huber_delta=delta)

        def differs(b: Any, settings: LossSettings = settings) -> tuple[float, float]:
            def whole(values: list[list[float]]) -> float:
                clip, delta = settings.value_clip, settings.huber_delta
                rows = zip(values, b.old_values, b.returns, strict=True)
                errors = [[loops.value_error(*three, clip, delta) for three in zip(*row, strict=True)] for row in rows]
                return loops.aggregated(errors, b.mask, "token-mean")

            old, target, counted = _tensor(b.old_values), _tensor(b.returns), _tensor(b.mask)
            return _compared(b, "values", lambda table: value_loss(table, old, target, settings, counted).loss, whole)

        yield Comparison(f"value loss clip {clip} huber {delta}", mask, differs)


def _ours(b: Any, name: str, *, values_at_gaps: bool = True, **keys: Any) -> list[list[float]]:
    """Return our advantages of a batch, one row a trajectory; every episode ends with its last token."""
    dones = torch.zeros(TOKENS, ROWS, dtype=torch.bool)
    dones[-1] = True
    values = torch.cat([_tensor(b.values).T, torch.zeros(1, ROWS, dtype=torch.float64)])
    kl = _tensor(b.kl).T if keys.get("kl_beta") or name == "distillation" else None
    rewards, mask = _tensor(b.rewards).T, _tensor(b.mask).T
    trajectories = Trajectories(rewards=rewards, dones=dones, values=values, mask=mask, kl=kl)
    settings = AdvantageSettings(**{"group_size": GROUP, "normalize_advantages": False, **keys})
    return get_advantage(name)(trajectories, settings).advantages.T.tolist()


def _less_kl(b: Any, beta: float) -> list[list[float]]:
    return [[r - beta * d for r, d in zip(*rows, strict=True)] for rows in zip(b.rewards, b.kl, strict=True)]


def _loop_advantages(b: Any, name: str, gamma: float, decay: float, beta: float, **peer: Any) -> list[list[float]]:
    """Return the loop's advantages; `peer` names how a peer defines them."""
    rewards = _less_kl(b, beta)
    if name in ("gae", "turn_gae"):
        function = getattr(loops, name)
        rows = zip(rewards, b.values, b.mask, strict=True)
        return [function(reward, value, mask, gamma, decay) for reward, value, mask in rows]
    if name == "distillation":
        return [[-d if c else 0.0 for d, c in zip(*rows, strict=True)] for rows in zip(b.kl, b.mask, strict=True)]
    source = b.rewards if name == "reinforce_pp_baseline" else rewards
    scores = [sum(r for r, c in zip(*rows, strict=True) if c) for rows in zip(source, b.mask, strict=True)]
    if name in ("grpo", "dr_grpo", "rloo"):
        compared = loops.relative(scores, GROUP, name, peer.get("epsilon", 1e-6))
        return [[score if c else 0.0 for c in mask] for score, mask in zip(compared, b.mask, strict=True)]
    table = [loops.returns(reward, mask, gamma) for reward, mask in zip(rewards, b.mask, strict=True)]
    if name == "reinforce_pp_baseline":
        for row, mask in enumerate(b.mask):
            first = row // GROUP * GROUP
            last = max((at for at, counts in enumerate(mask) if counts), default=0)
            values = [
                value if at != last else value - sum(scores[first : first + GROUP]) / GROUP
                for at, value in enumerate(rewards[row])
            ]
            table[row] = loops.returns(values, mask, gamma)
    return loops.normalized(table, b.mask, peer.get("epsilon", 1e-8), peer.get("less", 1))


def _furthest(ours: list[list[float]], theirs: list[list[float]]) -> float:
    return max(abs(a - b) for rows in zip(ours, theirs, strict=True) for a, b in zip(*rows, strict=True))


def advantages(mask: str) -> Iterator[Comparison]:
    """Yield the comparisons of advantages on one kind of mask."""
    names = ("gae", "turn_gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "distillation")
    for name, (gamma, decay), beta in product(names, ((1.0, 1.0), (0.9, 0.8)), (0.0, 0.1)):

        def differs(
            b: Any, name: str = name, gamma: float = gamma, decay: float = decay, beta: float = beta
        ) -> tuple[float, float]:
            scaled = name.startswith("reinforce")
            ours = _ours(b, name, gamma=gamma, gae_lambda=decay, kl_beta=beta, normalize_advantages=scaled)
            return _furthest(ours, _loop_advantages(b, name, gamma, decay, beta)), 0.0

        yield Comparison(f"{name} gamma {gamma} lambda {decay} beta {beta}", mask, differs)
    yield from _explained(mask)


def _explained(mask: str) -> Iterator[Comparison]:
    """Yield formulas that a peer defines otherwise: ours is theirs, corrected by the one difference."""
    for peer, epsilon in (("TRL", 1e-4), ("OpenRLHF", 1e-9)):

        def grpo(b: Any, epsilon: float = epsilon) -> tuple[float, float]:
            theirs = _loop_advantages(b, "grpo", 1.0, 1.0, 0.0, epsilon=epsilon)
            scores = [sum(r for r, c in zip(*rows, strict=True) if c) for rows in zip(b.rewards, b.mask, strict=True)]
            for row in range(ROWS):
                first = row // GROUP * GROUP
                spread = loops.deviation(scores[first : first + GROUP])
                theirs[row] = [value * (spread + epsilon) / (spread + 1e-6) for value in theirs[row]]
            return _furthest(_ours(b, "grpo"), theirs), 0.0

        yield Comparison(f"grpo of {peer}", mask, grpo, f"{peer} adds {epsilon:g} to the deviation, ours 1e-6")

    def by_n(b: Any) -> tuple[float, float]:
        theirs = _loop_advantages(b, "reinforce_pp", 1.0, 1.0, 0.0, less=0, epsilon=0.0)
        count = sum(map(sum, b.mask))
        theirs = [[value * math.sqrt((count - 1) / count) for value in row] for row in theirs]
        ours = _ours(b, "reinforce_pp", normalize_advantages=True)
        return max(0.0, _furthest(ours, theirs) - 1e-7), 0.0

    yield Comparison("reinforce_pp of OpenRLHF", mask, by_n, "OpenRLHF divides by n, ours by n - 1")
    if mask == "empty row":
        for how in ("seq-mean-token-mean", "seq-mean-token-sum-norm"):

            def rows(b: Any, how: str = how) -> tuple[float, float]:
                losses = [[_clipped(b, row, token) for token in range(TOKENS)] for row in range(ROWS)]
                kept = sum(map(any, b.mask))
                theirs = loops.aggregated(losses, b.mask, how, empty_rows=True) * ROWS / kept
                keys = ("logprobs", "old_logprobs", "advantages", "mask")
                inputs = LossInputs(**{key: _tensor(getattr(b, key)) for key in keys})
                loss = get_policy_loss("actor")(inputs, LossSettings(clip_ratio_c=None, loss_agg_func=how)).loss  # type: ignore[arg-type]
                return abs(loss.item() - theirs), 0.0

            yield Comparison(f"{how} of TRL", mask, rows, "TRL counts rows without tokens, ours leaves them out")
    if mask == "gaps":

        def counted(b: Any) -> tuple[float, float]:
            whole = SimpleNamespace(**vars(b))
            whole.mask = [[at <= max(i for i, c in enumerate(row) if c) for at in range(TOKENS)] for row in b.mask]
            for key in ("rewards", "values"):
                rows = zip(getattr(b, key), b.mask, strict=True)
                setattr(whole, key, [[v if c else 0.0 for v, c in zip(*pair, strict=True)] for pair in rows])
            theirs = _loop_advantages(whole, "gae", 0.9, 0.8, 0.0)
            return _furthest(_ours(whole, "gae", gamma=0.9, gae_lambda=0.8), theirs), 0.0

        yield Comparison(
            "gae of OpenRLHF", mask, counted, "OpenRLHF counts a tool's words with value 0, ours passes over"
        )


def _clipped(b: Any, row: int, token: int) -> float:
    return loops.ppo(_ratio(b, b.logprobs, row, token), b.advantages[row][token], 0.2, 0.2, None)


def comparisons() -> Iterator[Comparison]:
    """Yield all comparisons."""
    for mask in MASKS:
        yield from policy_losses(mask)
        yield from value_losses(mask)
        yield from advantages(mask)


def counts(draws: int = DRAWS) -> tuple[Counter[str], list[str]]:
    """Return how many comparisons are equal, explained and different, and the different ones with their largest."""
    result, different = Counter[str](), list[str]()
    for comparison in comparisons():
        pairs = [comparison.differs(batch(seed, comparison.mask)) for seed in range(draws)]
        value, gradient = (max(column) for column in zip(*pairs, strict=True))
        if value > CLOSE or gradient > CLOSE_GRADIENT:
            different.append(f"{comparison.name}, {comparison.mask}: {value:.3g}, gradient {gradient:.3g}")
            result["different"] += 1
        else:
            result["explained" if comparison.explained else "equal"] += 1
    return result, different


def stored() -> dict[str, int]:
    """Return the counts."""
    data: dict[str, int] = json.loads(COUNTS.read_text(encoding="utf-8"))
    return data


def main(arguments: list[str]) -> None:
    """Print the counts; see the module."""
    result, different = counts()
    print(*different, sep="\n")
    data = {name: result[name] for name in ("equal", "explained", "different")}
    print(json.dumps(data))
    if "--write" in arguments:
        COUNTS.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
