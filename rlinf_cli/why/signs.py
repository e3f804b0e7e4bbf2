"""Signs that a run does not learn: the rows of `causes.toml`, and the functions that they name.

These functions return the fields of a row's texts, or check a condition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

from rlinf_cli.runs.metric_columns import MetricColumn
from rlinf_cli.why.facts import RunFacts
from rlinf_cli.why.findings import FindingKind, RunFinding, causes
from rlinf_core.runners.metrics import mean
from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.first_contact import ContactCheck
from rlinf_core.runners.storage.run_events import QUARANTINE

_STEPS: Final = 5
_MANY_STEPS: Final = 10
_CLIPPED: Final = "train/actor/clip_fraction"
_KL: Final = "train/actor/approx_kl"
_ENTROPY: Final = "train/actor/entropy"
_NORM: Final = "train/actor/grad_norm"
_RATE: Final = "train/actor/lr"
_REWARDS: Final = ("rollout/correct", "rollout/reward", "env/success_once", "env/return")
_WATCHED: Final = ("train/actor/", "rollout/", "env/")
_FAILED: Final = "failed/"
_LEFT_OUT: Final = "eval/left_out"
# Thresholds for shares of answers.
_MANY: Final = 0.2
_RIGHT: Final = 0.999
_CUT: Final = 0.9
# A share of successes has collapsed if it falls below this part of its peak.
_COLLAPSED: Final = 0.25
_LEAST_PEAK: Final = 0.2
# Below these values a policy equals its predecessor, and nearly always draws the same token.
_NO_CHANGE: Final = 1e-12
_NO_ENTROPY: Final = 0.01
_FALL: Final = 20.0
_GOOD: Final = 0.9
_BETTER: Final = 0.05
# If a bound leaves less than this part of a gradient, the optimizer's own constants outweigh its steps.
_LEAST_LEFT: Final = 1e-6

# The fields of the texts; None without the sign. `since` is the first step with the sign, `shown` the evidence.
Fields = Mapping[str, Any] | None


class Streak(NamedTuple):
    """The steps of a run from `since` to its end, in which a metric has been within bounds."""

    facts: RunFacts
    column: MetricColumn
    since: int


def from_the_start(streak: Streak) -> bool:
    """Return whether the streak began at the first step."""
    return streak.since == streak.column.steps[0]


def later(streak: Streak) -> bool:
    """Return whether the streak began after the first step."""
    return not from_the_start(streak)


def has_rate(streak: Streak) -> bool:
    """Return whether the learning rate is above 0."""
    return streak.facts.column(_RATE).since(0.0, 0.0) is None


def not_solved(streak: Streak) -> bool:
    """Return whether some answers are wrong."""
    right = streak.facts.column("rollout/correct", "rollout/reward")
    return not len(right) or right.values[-1] < _RIGHT


def precision(streak: Streak) -> Sequence[str]:
    """Return the learning rate and the precision of the weights."""
    precision, rates = streak.facts.text("actor.model.precision"), streak.facts.column(_RATE)
    rate = [f"metrics.jsonl: `{_RATE}` is {rates.values[-1]:.3g}"] if len(rates) else []
    return [*rate, *([f"config.yaml: `actor.model.precision` is {precision}"] if precision else [])]


def entropy_collapsed(facts: RunFacts) -> Fields:
    """Find a policy that no longer explores."""
    every = facts.column(_ENTROPY)
    since = every.since(0.0, _NO_ENTROPY)
    # Steps without samples have an entropy of 0, as where all answers to a prompt have become equal.
    entropies = every.where(lambda _, value: value != 0.0)
    # Only a continuous action has an entropy below 0.
    if since is None or not len(entropies) or min(entropies.values) < 0 or every.steps[-1] - since + 1 < _STEPS:
        return None
    first, value, rewards = entropies.values[0], entropies.values[-1], facts.column(*_REWARDS)
    now = rewards.values[-1] if len(rewards) else 0.0
    well = now >= _GOOD or _is_better(now, rewards.where(lambda step, _: step < since).mean())
    if first < max(_NO_ENTROPY, _FALL * value) or well:
        return None
    return {"first": first, "value": value, "since": since}


def staleness_at_bound(facts: RunFacts) -> Fields:
    """Find samples that always have the maximum staleness, without progress."""
    bound = facts.number("runner.max_staleness") or 0
    ages = facts.column("rollout/staleness_mean", "rollout/staleness")
    since = ages.since(bound - 0.01, math.inf)
    # With a bound of 1 this is normal for every run whose rollouts continue during training.
    if bound < 2 or since is None or ages.steps[-1] - since + 1 < 3 * _STEPS:
        return None
    rewards = facts.column(*_REWARDS).where(lambda step, _: step >= since).values
    third = len(rewards) // 3
    if third and _is_better(mean(rewards[-third:]), mean(rewards[:third])):
        return None
    return {"bound": bound, "age": ages.values[-1], "since": since}


def _is_better(after: float, before: float) -> bool:
    return after - before > _BETTER * max(abs(before), abs(after))


def reward_collapsed(facts: RunFacts) -> Fields:
    """Find a policy that solves far less than before."""
    name = next((name for name in ("rollout/correct", "env/success_once") if name in facts.columns), "")
    column = facts.column(name)
    if len(column) < 2 * _MANY_STEPS:
        return None
    means = [mean(column.values[end - _STEPS : end]) for end in range(_STEPS, len(column) + 1)]
    best = max(means)
    bound = _COLLAPSED * best
    since = column.since(0.0, bound)
    if best < _LEAST_PEAK or since is None or column.steps[-1] - since + 1 < _STEPS:
        return None
    at = column.steps[means.index(best) + _STEPS - 1]
    return {"metric": name, "best": best, "at": at, "bound": bound, "value": column.values[-1], "since": since}


def policy_does_not_change(facts: RunFacts) -> Fields:
    """Find updates that do not change the policy."""
    clipped, divergence = facts.column(_CLIPPED).last(_MANY_STEPS), facts.column(_KL).last(_MANY_STEPS)
    several = max(facts.number("algorithm.update_epoch") or 1, facts.number("algorithm.n_minibatches") or 1) > 1
    largest = max(map(abs, divergence.values), default=math.inf)
    if not several or len(clipped) < _MANY_STEPS or max(clipped.values) > 0 or largest > _NO_CHANGE:
        return None
    return {"largest": largest, "since": clipped.steps[0], "until": clipped.steps[-1]}


def _is_constant(column: MetricColumn) -> bool:
    values = column.values
    return bool(values) and all(map(math.isfinite, values)) and max(values) == min(values)


def reward_never_varies(facts: RunFacts) -> Fields:
    """Find a reward that is always the same."""
    spread, rewards = facts.column("rollout/reward_std"), facts.column("rollout/reward")
    if len(spread):
        constant = max(spread.values) == 0.0 and _is_constant(rewards)
    else:
        # Rewards for each step add up to the same in passes of equal length, so compare the returns of episodes.
        returns = facts.column("env/return")
        constant = len(returns) >= _STEPS and _is_constant(returns) and _is_constant(rewards)
    if not constant or len(rewards) < _STEPS:
        return None
    return {"value": rewards.values[-1], "steps": len(rewards), "since": rewards.steps[0]}


def reward_fails(facts: RunFacts) -> Fields:
    """Find many answers that could not be scored."""
    answers = (facts.number("data.rollout_batch_size") or 0) * (facts.number("algorithm.group_size") or 1)
    last = {
        name: column
        for name, column in facts.columns.items()
        if name.startswith(_FAILED) and len(column) and column.steps[-1] >= facts.step - 1
    }
    failed = sum(column.values[-1] for column in last.values())
    if not answers or failed < _MANY * answers:
        return None
    metric, column = max(last.items(), key=lambda item: item[1].values[-1])
    of_metric = {"metric": metric, "most": column.values[-1], "until": column.steps[-1], "since": column.steps[0]}
    return {"failed": failed, "answers": answers, **of_metric}


def gradients_clipped_away(facts: RunFacts) -> Fields:
    """Find a bound on gradients so low that it removes them."""
    bound, norms = facts.number("actor.optim.clip_grad"), facts.column(_NORM)
    largest = max((norm for norm in norms.values if norm == norm), default=0.0)
    if not bound or len(norms) < _STEPS or min(norms.values[-_STEPS:]) * _LEAST_LEFT < bound or not largest:
        return None
    ends = {"norm": norms.values[-1], "until": norms.steps[-1], "since": norms.steps[0]}
    return {"bound": bound, "largest": largest, **ends}


def not_finite(facts: RunFacts) -> Fields:
    """Find metrics that are NaN or infinite."""
    broken: dict[str, int] = {}
    for name, column in facts.columns.items():
        if name.startswith(_WATCHED) and column.values and not math.isfinite(column.values[-1]):
            fine = [step for step, value in zip(column.steps, column.values, strict=True) if math.isfinite(value)]
            broken[name] = next(step for step in column.steps if not fine or step > fine[-1])
    if not broken:
        return None
    first = min(broken, key=lambda name: broken[name])
    others = "" if len(broken) == 1 else f", and {len(broken) - 1} other metrics"
    shown = [f"metrics.jsonl: `{name}` is null since step {step}" for name, step in list(broken.items())[:_STEPS]]
    return {"first": first, "since": broken[first], "others": others, "shown": shown}


def evaluated_with_seeds_of_training(facts: RunFacts) -> Fields:
    """Find an evaluation that uses the starts of training."""
    seeds = [facts.number(f"env.{part}.seed") for part in ("train", "eval")]
    tasks = [facts.text(f"env.{part}.task") for part in ("train", "eval")]
    same = seeds[0] is not None and seeds[0] == seeds[1] and tasks[0] == tasks[1]
    return {"seed": seeds[0]} if same and _is_evaluated(facts) else None


def evaluated_on_rows_of_training(facts: RunFacts) -> Fields:
    """Find an evaluation that uses rows of the training data."""
    trained, tested = (_paths(facts, f"data.{part}_data_paths") for part in ("train", "val"))
    shared = sorted(trained & tested)
    return {"path": shared[0]} if shared and _is_evaluated(facts) else None


def _is_evaluated(facts: RunFacts) -> bool:
    return any(name.startswith("eval/") for name in facts.columns)


def _paths(facts: RunFacts, key: str) -> set[str]:
    return {str(value) for name, value in facts.config.items() if name == key or name.startswith(f"{key}[")} - {""}


def right_answers_fail(facts: RunFacts) -> Fields:
    """Find right answers that a reward judged wrong before the first step."""
    check = next((check for check in _differing(facts) if check.component == "reward"), None)
    return None if check is None else {"judge": check.with_, "note": check.note}


def contact_differs(facts: RunFacts) -> Fields:
    """Find another comparison before the first step that failed."""
    checks = _differing(facts)
    if not checks or right_answers_fail(facts) is not None:
        return None
    words = [f"{one.component}: {one.what}, {one.with_}: {one.largest_difference or ''} {one.note}" for one in checks]
    shown = [f"first_contact.json: {text}".rstrip() for text in words]
    return {"what": checks[0].what, "other": checks[0].with_, "shown": shown}


def _differing(facts: RunFacts) -> list[ContactCheck]:
    return [check for check in facts.checks if check.verdict == "differs"]


def items_set_aside(facts: RunFacts) -> Fields:
    """Find items that repeatedly killed processes."""
    if not facts.quarantined:
        return None
    (name, first), *others = sorted(facts.quarantined.items(), key=lambda named: named[1].time)
    replay = f"`rlinf why --replay {name.removesuffix('.json')}` does it again alone"
    return {
        "count": len(first.deaths),
        "kind": first.kind,
        "item": first.item,
        "rest": "" if not others else f", and {len(others)} other items",
        "replay": replay if first.replay else "run that item alone",
        "shown": [f"{QUARANTINE}/{name}: {death}" for death in dict.fromkeys(first.deaths[:_STEPS])],
        "since": first.step or None,
        "time": first.time,
    }


def evaluation_incomplete(facts: RunFacts) -> Fields:
    """Find episodes or answers that were left out of evaluations."""
    missing = facts.column(_LEFT_OUT).where(lambda _, value: math.isfinite(value) and value > 0)
    if not len(missing):
        return None
    counted = facts.column("eval/episodes", "eval/answers")
    at, last = missing.steps[-1], missing.values[-1]
    kept = dict(zip(counted.steps, counted.values, strict=True)).get(at, 0.0)
    return {"last": last, "whole": last + kept, "at": at, "shown": _lost(facts)}


def left_out(facts: RunFacts) -> Fields:
    """Find episodes or answers that were left out of training only."""
    shown = _lost(facts)
    if not shown or evaluation_incomplete(facts) is not None:
        return None
    return {"count": sum(_total(facts, name) for name in facts.columns if name.startswith(_FAILED)), "shown": shown}


def _lost(facts: RunFacts) -> list[str]:
    sums = {name: _total(facts, name) for name in facts.columns if name == _LEFT_OUT or name.startswith(_FAILED)}
    return [f"metrics.jsonl: `{name}` adds up to {count:.0f} over the run" for name, count in sums.items() if count]


def environment_raises(facts: RunFacts) -> Fields:
    """Find errors in the code of environments, which made episodes count as failed."""
    events = [event for event in facts.story if event.kind == run_events.ENVIRONMENT]
    count = _total(facts, "eval/env_errors") + _total(facts, "env/env_errors")
    if not events or not count:
        return None
    return {"count": count, "first": events[0].text, "shown": [f"events.jsonl: {event.text}" for event in events]}


def evaluated_answers_cut(facts: RunFacts) -> Fields:
    """Find an evaluation in which nearly all answers ended at the limit of tokens."""
    cut, answers = facts.column("eval/cut_off"), facts.column("eval/answers")
    if not len(cut) or not len(answers) or cut.values[-1] < max(1.0, _CUT * answers.values[-1]):
        return None
    return {"cut": cut.values[-1], "answers": answers.values[-1], "at": cut.steps[-1]}


def _total(facts: RunFacts, name: str) -> float:
    return sum(value for value in facts.column(name).values if math.isfinite(value))


@dataclass(frozen=True, slots=True)
class Sign:
    """A row of the table of signs: the conditions for a sign, and its description; see `causes.toml`."""

    code: str
    what: str
    do: str
    metric: str = ""
    bounds: tuple[float, float] = (0.0, 0.0)
    steps: int = 0
    when: str = ""
    shown: str = ""
    rule: str = ""
    evidence: str = "metrics.jsonl: `{metric}` is {value:.3g} in step {until}, and has been so since step {since}"
    kind: str = FindingKind.LEARNING

    def finding(self, facts: RunFacts) -> RunFinding | None:
        """Return the finding, or None without the sign."""
        fields = self._streak(facts) if self.metric else _function(self.rule)(facts)
        if fields is None:
            return None
        lines = fields.get("shown") or self.evidence.format_map(fields).splitlines()
        what, do = (text.format_map(fields) for text in (self.what, self.do))
        since, time = fields.get("since"), fields.get("time")
        return RunFinding(FindingKind(self.kind), self.code, what, tuple(lines), (do,), since, time)

    def _streak(self, facts: RunFacts) -> Mapping[str, Any] | None:
        """Return the fields for a metric that lies within the bounds, or None."""
        column = facts.column(self.metric)
        since = column.since(*self.bounds)
        if since is None or column.steps[-1] - since + 1 < self.steps:
            return None
        streak = Streak(facts, column, since)
        if self.when and not _function(self.when)(streak):
            return None
        values = {"since": since, "until": column.steps[-1], "first": column.values[0], "value": column.values[-1]}
        fields = {**values, "metric": self.metric}
        added = _function(self.shown)(streak) if self.shown else ()
        return {**fields, "shown": [self.evidence.format_map(fields), *added]}


@cache
def signs() -> Sequence[Sign]:
    """Return the table of signs."""
    return [Sign(**row) for row in causes()["signs"]]


def _function(name: str) -> Callable[[Any], Any]:
    """Return the function that a row names."""
    return globals()[name]
