"""Signs of another shape than a metric within bounds: a function each, and what rows of the table ask besides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from rlinf_cli.runs.metric_columns import MetricColumn
from rlinf_cli.why.facts import RunFacts
from rlinf_cli.why.finding import RunFinding, figures, finding
from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.evidence import QUARANTINE
from rlinf_core.runners.storage.first_contact import ContactCheck
from rlinf_core.statistics import mean

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
# Shares of answers.
_MANY: Final = 0.2
_RIGHT: Final = 0.999
_CUT: Final = 0.9
# A share of successes that falls below this part of what it was has collapsed.
_COLLAPSED: Final = 0.25
_LEAST_PEAK: Final = 0.2
# Below these a policy does the same as its predecessor, and draws the same token nearly always.
_NO_CHANGE: Final = 1e-12
_NO_ENTROPY: Final = 0.01
_FALL: Final = 20.0
_GOOD: Final = 0.9
_BETTER: Final = 0.05
# A bound that leaves less of a gradient makes steps of the optimizer that its own constants outweigh.
_LEAST_LEFT: Final = 1e-6
_TRUNCATED: Final = "raise `rollout.sampling_params.max_new_tokens`, or see that the model knows its token of the end"
# The code of items that were set aside.
SET_ASIDE: Final = "items-set-aside"


class Streak(NamedTuple):
    """The steps at the end of a run in which a metric has been within bounds.

    Attributes:
        facts: the run.
        column: the metric.
        since, until: the first and the last of the steps.
    """

    facts: RunFacts
    column: MetricColumn
    since: int
    until: int


def from_the_start(streak: Streak) -> bool:
    """Return whether it has been so since the first step."""
    return streak.since == streak.column.steps[0]


def later(streak: Streak) -> bool:
    """Return whether it has been otherwise before."""
    return not from_the_start(streak)


def has_rate(streak: Streak) -> bool:
    """Return whether the learning rate is above 0."""
    return streak.facts.column(_RATE).since(0.0, 0.0) is None


def not_solved(streak: Streak) -> bool:
    """Return whether answers are wrong, too."""
    right = streak.facts.column("rollout/correct", "rollout/reward")
    return not len(right) or right.values[-1] < _RIGHT


def precision(streak: Streak) -> Sequence[str]:
    """Return the learning rate and the precision of the weights."""
    precision, rates = streak.facts.text("actor.model.precision"), streak.facts.column(_RATE)
    rate = [f"metrics.jsonl: `{_RATE}` is {rates.values[-1]:.3g}"] if len(rates) else []
    return [*rate, *([f"config.yaml: `actor.model.precision` is {precision}"] if precision else [])]


def entropy_collapsed(facts: RunFacts) -> RunFinding | None:
    """Find a policy that no longer explores."""
    # A step without samples has an entropy of 0, which says nothing.
    every = facts.column(_ENTROPY)
    entropies = every.where(lambda _, value: value != 0.0)
    since = entropies.since(0.0, _NO_ENTROPY)
    # An entropy below 0 is that of a continuous action.
    if since is None or min(entropies.values) < 0 or every.steps[-1] - since + 1 < _STEPS:
        return None
    begin, rewards = entropies.values[0], facts.column(*_REWARDS)
    now = rewards.values[-1] if len(rewards) else 0.0
    well = now >= _GOOD or _is_better(now, rewards.where(lambda step, _: step < since).mean())
    if begin < max(_NO_ENTROPY, _FALL * entropies.values[-1]) or well:
        return None
    return finding(
        "entropy-collapsed",
        "the policy no longer explores: its entropy has collapsed",
        [
            f"metrics.jsonl: `{_ENTROPY}` fell from {begin:.3g} to {entropies.values[-1]:.3g}, and is"
            f" below {_NO_ENTROPY:g} since step {since}"
        ],
        "go back to a checkpoint before that step with a smaller `actor.optim.lr`, an `algorithm.entropy_bonus`, a"
        " larger `algorithm.clip_ratio_high` or an `algorithm.kl_beta`",
        since,
    )


def staleness_at_bound(facts: RunFacts) -> RunFinding | None:
    """Find samples that are always as old as they may be, without progress."""
    bound = facts.number("runner.max_staleness") or 0
    ages = facts.column("rollout/staleness_mean", "rollout/staleness")
    since = ages.since(bound - 0.01, math.inf)
    # With a bound of 1 it is so in every run whose rollouts go on during training.
    if bound < 2 or since is None or ages.steps[-1] - since + 1 < 3 * _STEPS:
        return None
    rewards = facts.column(*_REWARDS).where(lambda step, _: step >= since).values
    third = len(rewards) // 3
    if third and _is_better(mean(rewards[-third:]), mean(rewards[:third])):
        return None
    return finding(
        "staleness-at-bound",
        f"all samples are {bound:.0f} versions old, the most that `runner.max_staleness` allows: generation waits for"
        " training",
        [f"metrics.jsonl: the staleness is {ages.values[-1]:.2f} on the mean since step {since}"],
        "lower `runner.max_staleness`, which costs no time as long as rollouts are ready before they are needed, or"
        " give training more of the machines",
        since,
    )


def _is_better(after: float, before: float) -> bool:
    return after - before > _BETTER * max(abs(before), abs(after))


def reward_collapsed(facts: RunFacts) -> RunFinding | None:
    """Find a policy that solves far less than it did."""
    name = next((name for name in ("rollout/correct", "env/success_once") if name in facts.columns), "")
    column = facts.column(name)
    if len(column) < 2 * _MANY_STEPS:
        return None
    means = [mean(column.values[end - _STEPS : end]) for end in range(_STEPS, len(column) + 1)]
    best = max(means)
    since = column.since(0.0, _COLLAPSED * best)
    if best < _LEAST_PEAK or since is None or column.steps[-1] - since + 1 < _STEPS:
        return None
    at = column.steps[means.index(best) + _STEPS - 1]
    return finding(
        "reward-collapsed",
        f"the policy solved {best:.0%} of its tasks until step {at}, and {column.values[-1]:.0%} now",
        [f"metrics.jsonl: `{name}` is below {_COLLAPSED * best:.2g} since step {since}"],
        f"look at the report around step {since}: at `{_ENTROPY}`, `{_KL}` and `{_NORM}`; go back to a checkpoint of"
        f" step {at} or before with a smaller `actor.optim.lr`",
        since,
    )


def policy_does_not_change(facts: RunFacts) -> RunFinding | None:
    """Find updates that change nothing."""
    clipped, divergence = facts.column(_CLIPPED).last(_MANY_STEPS), facts.column(_KL).last(_MANY_STEPS)
    several = max(facts.number("algorithm.update_epoch") or 1, facts.number("algorithm.n_minibatches") or 1) > 1
    largest = max(map(abs, divergence.values), default=math.inf)
    if not several or len(clipped) < _MANY_STEPS or max(clipped.values) > 0 or largest > _NO_CHANGE:
        return None
    return finding(
        "policy-does-not-change",
        "the updates of a step do not change the policy: it is the same after them",
        [
            f"metrics.jsonl: `{_CLIPPED}` is 0 and `{_KL}` at most {largest:.1g} from step {clipped.steps[0]} to"
            f" {clipped.steps[-1]}, with several updates in each"
        ],
        f"raise `actor.optim.lr`; look whether the loss has a gradient (`{_NORM}`)",
        clipped.steps[0],
    )


def _is_constant(column: MetricColumn) -> bool:
    values = column.values
    return bool(values) and all(map(math.isfinite, values)) and max(values) == min(values)


def reward_never_varies(facts: RunFacts) -> RunFinding | None:
    """Find a reward that is the same for all."""
    spread, rewards = facts.column("rollout/reward_std"), facts.column("rollout/reward")
    if len(spread):
        constant = max(spread.values) == 0.0 and _is_constant(rewards)
    else:
        # A reward for each step is the same in passes of equal length, though episodes differ.
        returns = facts.column("env/return")
        constant = len(returns) >= _STEPS and _is_constant(returns) and _is_constant(rewards)
    if not constant or len(rewards) < _STEPS:
        return None
    value = rewards.values[-1]
    return finding(
        "reward-never-varies",
        f"the reward never varies: it is {value:.6g} for all",
        [f"metrics.jsonl: `rollout/reward` is {value:.6g} in all {len(rewards)} steps"],
        "score a right and a wrong answer, or a good and a bad episode, by hand: the reward must tell them apart; one"
        " that is found by chance alone needs an easier start or a reward for parts of the way",
        rewards.steps[0],
    )


def reward_fails(facts: RunFacts) -> RunFinding | None:
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
    kind, column = max(last.items(), key=lambda item: item[1].values[-1])
    return finding(
        "reward-fails",
        f"the reward fails: {failed:.0f} of {answers:.0f} answers of a step could not be scored",
        [f"metrics.jsonl: `{kind}` is {column.values[-1]:.0f} in step {column.steps[-1]}"],
        "score one answer by hand with the same function; `rlinf report --samples` shows answers with the reasons",
        column.steps[0],
    )


def gradients_clipped_away(facts: RunFacts) -> RunFinding | None:
    """Find a bound on gradients so low that it removes them."""
    bound, norms = facts.number("actor.optim.clip_grad"), facts.column(_NORM)
    largest = max((norm for norm in norms.values if norm == norm), default=0.0)
    if not bound or len(norms) < _STEPS or min(norms.values[-_STEPS:]) * _LEAST_LEFT < bound or not largest:
        return None
    return finding(
        "gradients-clipped-away",
        f"gradients are clipped to nothing: `actor.optim.clip_grad` is {bound:g}, their norm up to {largest:.3g}",
        [
            f"config.yaml: `actor.optim.clip_grad` is {bound:g}",
            f"metrics.jsonl: `{_NORM}` is {norms.values[-1]:.3g} in step {norms.steps[-1]}, before clipping",
        ],
        "set `actor.optim.clip_grad` near the usual norm, such as 1",
        norms.steps[0],
    )


def not_finite(facts: RunFacts) -> RunFinding | None:
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
    return finding(
        "not-finite",
        f"`{first}` is NaN or infinite since step {broken[first]}{others}",
        [f"metrics.jsonl: `{name}` is null since step {step}" for name, step in list(broken.items())[:_STEPS]],
        "look at what it is made of in the step before: rewards, observations, advantages, the learning rate",
        broken[first],
    )


def evaluated_on_training(facts: RunFacts) -> RunFinding | None:
    """Find an evaluation on what was trained on: the same starts, or the same rows."""
    code = "evaluated-on-training"
    if not any(name.startswith("eval/") for name in facts.columns):
        return None
    seeds = [facts.number(f"env.{part}.seed") for part in ("train", "eval")]
    tasks = [facts.text(f"env.{part}.task") for part in ("train", "eval")]
    if seeds[0] is not None and seeds[0] == seeds[1] and tasks[0] == tasks[1]:
        what = "evaluations start where training starts: both have the same seed"
        shown = f"config.yaml: `env.train.seed` and `env.eval.seed` are {seeds[0]:.0f}"
        return finding(code, what, [shown], "remove `env.eval.seed`: its default is another one")
    trained, tested = (_paths(facts, f"data.{part}_data_paths") for part in ("train", "val"))
    shared = sorted(trained & tested)
    if not shared:
        return None
    shown = f"config.yaml: `{shared[0]}` is in `data.train_data_paths` and in `data.val_data_paths`"
    return finding(
        code, "evaluations use the rows that training uses", [shown], "keep rows apart for `data.val_data_paths`"
    )


def _paths(facts: RunFacts, key: str) -> set[str]:
    return {str(value) for name, value in facts.config.items() if name == key or name.startswith(f"{key}[")} - {""}


def contact_differs(facts: RunFacts) -> RunFinding | None:
    """Find a comparison before the first step that did not agree."""
    differing = [check for check in facts.checks if check.verdict == "differs"]
    rewards = [check for check in differing if check.component == "reward"]
    if rewards:
        return finding(
            "right-answers-fail",
            f"the right answers of `data` are not right by {rewards[0].with_}",
            [f"first_contact.json: {rewards[0].note}"],
            "score one of them by hand with the same function, called as the run does: with the answer's text",
        )
    if not differing:
        return None
    return finding(
        "first-contact-differs",
        f"{differing[0].what} differ from {differing[0].with_}",
        [_comparison(check) for check in differing],
        "docs/run-folder.md lists what was compared; the run learns from what differs",
    )


def _comparison(check: ContactCheck) -> str:
    words = f"{check.component}: {check.what}, {check.with_}: {check.largest_difference or ''} {check.note}"
    return f"first_contact.json: {words}".rstrip()


def items_set_aside(facts: RunFacts) -> RunFinding | None:
    """Find items that processes died of again and again."""
    if not facts.quarantined:
        return None
    (name, first), *others = sorted(facts.quarantined.items(), key=lambda named: named[1].time)
    rest = "" if not others else f", and {len(others)} other items"
    replay = f"`rlinf why --replay {name.removesuffix('.json')}` does it again alone"
    return finding(
        SET_ASIDE,
        f"{len(first.deaths)} processes died of {first.kind} {first.item}, which was quarantined{rest}",
        [f"{QUARANTINE}/{name}: {death}" for death in dict.fromkeys(first.deaths[:_STEPS])],
        f"{replay if first.replay else 'run that item alone'}; what dies of it is at fault, or the item is: the run"
        " continues without it",
        first.step or None,
        time=first.time,
    )


def left_out(facts: RunFacts) -> RunFinding | None:
    """Find episodes or answers that were left out of evaluations or of training."""
    sums = {name: _total(facts, name) for name in facts.columns if name == _LEFT_OUT or name.startswith(_FAILED)}
    lost = {name: count for name, count in sums.items() if count}
    if not lost:
        return None
    shown = [f"metrics.jsonl: `{name}` adds up to {count:.0f} over the run" for name, count in lost.items()]
    if _LEFT_OUT not in lost:
        what = f"{sum(lost.values()):.0f} episodes or answers were left out of training, for no fault of the policy"
        return figures("left-out", what, shown, "look at their causes in the logs of the workers")
    missing, counted = facts.column(_LEFT_OUT), facts.column("eval/episodes", "eval/answers")
    at = missing.where(lambda _, value: value > 0)
    step, last = at.steps[-1], at.values[-1]
    kept = dict(zip(counted.steps, counted.values, strict=True)).get(step, 0.0)
    what = f"evaluations are incomplete: {last:.0f} of {last + kept:.0f} were left out after step {step}"
    do = "mend what failed (the logs of the workers have it): what is left out may be worse than the rest"
    return figures("evaluation-incomplete", what, shown, do)


def environment_raises(facts: RunFacts) -> RunFinding | None:
    """Find errors in the code of environments, of which episodes counted as failed."""
    events = [event for event in facts.story if event.kind == run_events.ENVIRONMENT]
    count = _total(facts, "eval/env_errors") + _total(facts, "env/env_errors")
    if not events or not count:
        return None
    shown = [f"events.jsonl: {event.text}" for event in events]
    what = f"the environment has an error in its code, by which {count:.0f} episodes count as failed: {events[0].text}"
    return figures("environment-raises", what, shown, "mend that line: the same seed and actions raise there again")


def evaluated_answers_cut(facts: RunFacts) -> RunFinding | None:
    """Find that nearly all answers of the last evaluation end at the limit of tokens."""
    cut, answers = facts.column("eval/cut_off"), facts.column("eval/answers")
    if not len(cut) or not len(answers) or cut.values[-1] < max(1.0, _CUT * answers.values[-1]):
        return None
    count = f"{cut.values[-1]:.0f} of {answers.values[-1]:.0f}"
    what = f"{count} answers of the last evaluation are cut off at the limit of tokens before they end"
    shown = f"metrics.jsonl: `eval/cut_off` is {cut.values[-1]:.0f} in step {cut.steps[-1]}"
    return figures("answers-truncated", what, [shown], _TRUNCATED)


def _total(facts: RunFacts, name: str) -> float:
    return sum(value for value in facts.column(name).values if math.isfinite(value))
