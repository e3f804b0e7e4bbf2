"""Faults of the input: numbers that are none, observations that show nothing, evaluation on what was trained on."""

from __future__ import annotations

import math
from typing import Final

from rlinf_cli.why.facts import RunFacts
from rlinf_cli.why.finding import FindingKind, RunFinding
from rlinf_core.runners.storage.evidence import QUARANTINE
from rlinf_core.runners.storage.first_contact import ContactCheck

_STEPS: Final = 5
_SKIPPED: Final = "train/actor/skipped_updates"
_OBSERVED: Final = "rollout/observations_std"
_WATCHED: Final = ("train/actor/", "rollout/", "env/")


def updates_are_skipped(facts: RunFacts) -> RunFinding | None:
    """Find updates that were left out for NaN and infinities, in every one of the last steps."""
    skipped = facts.column(_SKIPPED)
    since = skipped.since(1.0, math.inf)
    if since is None or skipped.steps[-1] - since + 1 < _STEPS:
        return None
    return RunFinding(
        FindingKind.LEARNING,
        "updates-skipped",
        "losses or gradients are NaN or infinite in every step, and those updates are left out",
        (f"metrics.jsonl: `{_SKIPPED}` is {skipped.values[-1]:.0f} in step {skipped.steps[-1]}",),
        ("`runner.on_nonfinite: stop` names the first number that is not finite; lower `actor.optim.lr`",),
        step=since,
    )


def numbers_are_not_finite(facts: RunFacts) -> RunFinding | None:
    """Find metrics that stopped being numbers."""
    broken: dict[str, int] = {}
    for name, column in facts.columns.items():
        if name.startswith(_WATCHED) and column.values and not math.isfinite(column.values[-1]):
            fine = [step for step, value in zip(column.steps, column.values, strict=True) if math.isfinite(value)]
            broken[name] = next(step for step in column.steps if not fine or step > fine[-1])
    if not broken:
        return None
    first = min(broken, key=lambda name: broken[name])
    others = "" if len(broken) == 1 else f", and {len(broken) - 1} other metrics"
    return RunFinding(
        FindingKind.LEARNING,
        "not-finite",
        f"`{first}` is NaN or infinite since step {broken[first]}{others}",
        tuple(f"metrics.jsonl: `{name}` is null since step {step}" for name, step in list(broken.items())[:_STEPS]),
        ("look at what it is made of in the step before: rewards, observations, advantages, the learning rate",),
        step=broken[first],
    )


def observations_are_constant(facts: RunFacts) -> RunFinding | None:
    """Find observations that are all the same."""
    spread = facts.column(_OBSERVED)
    since = spread.since(0.0, 0.0)
    if since is None or spread.steps[-1] - since + 1 < _STEPS:
        return None
    return RunFinding(
        FindingKind.LEARNING,
        "observations-constant",
        "all observations are the same, so the policy acts without seeing anything",
        (f"metrics.jsonl: `{_OBSERVED}` is 0 from step {since} to {spread.steps[-1]}",),
        ("look at what the environment returns, at its camera, and at the statistics of the normalization",),
        step=since,
    )


def evaluated_on_training(facts: RunFacts) -> RunFinding | None:
    """Find an evaluation on what was trained on: the same starts, or the same rows."""
    if not any(name.startswith("eval/") for name in facts.columns):
        return None
    seeds = [facts.number(f"env.{part}.seed") for part in ("train", "eval")]
    tasks = [facts.text(f"env.{part}.task") for part in ("train", "eval")]
    if seeds[0] is not None and seeds[0] == seeds[1] and tasks[0] == tasks[1]:
        what = "evaluations start where training starts: both have the same seed"
        evidence = f"config.yaml: `env.train.seed` and `env.eval.seed` are {seeds[0]:.0f}"
        do = "remove `env.eval.seed`: its default is another one"
    else:
        trained, tested = (_paths(facts, f"data.{part}_data_paths") for part in ("train", "val"))
        shared = sorted(trained & tested)
        if not shared:
            return None
        what = "evaluations use the rows that training uses"
        evidence = f"config.yaml: `{shared[0]}` is in `data.train_data_paths` and in `data.val_data_paths`"
        do = "keep rows apart for `data.val_data_paths`"
    return RunFinding(FindingKind.LEARNING, "evaluated-on-training", what, (evidence,), (do,))


def contact_differs(facts: RunFacts) -> RunFinding | None:
    """Find a comparison before the first step that did not agree."""
    differing = [check for check in facts.checks if check.verdict == "differs" and not _is_of_reward(check)]
    if not differing:
        return None
    return RunFinding(
        FindingKind.LEARNING,
        "first-contact-differs",
        f"{differing[0].what} differ from {differing[0].with_}",
        tuple(
            f"first_contact.json: {check.component}: {check.what}, {check.with_}: {check.largest_difference or ''}"
            f" {check.note}".rstrip()
            for check in differing
        ),
        ("docs/run-folder.md lists what was compared; the run learns from what differs",),
    )


def right_answers_fail(facts: RunFacts) -> RunFinding | None:
    """Find that the right answers of the data are not right by the reward."""
    check = next((check for check in facts.checks if check.verdict == "differs" and _is_of_reward(check)), None)
    if check is None:
        return None
    return RunFinding(
        FindingKind.LEARNING,
        "right-answers-fail",
        f"the right answers of `data` are not right by {check.with_}",
        (f"first_contact.json: {check.note}",),
        ("score one of them by hand with the same function, called as the run does: with the answer's text",),
    )


def _is_of_reward(check: ContactCheck) -> bool:
    return check.component == "reward"


def items_are_set_aside(facts: RunFacts) -> RunFinding | None:
    """Find items that processes died of again and again."""
    if not facts.quarantined:
        return None
    (name, first), *others = sorted(facts.quarantined.items(), key=lambda named: named[1].time)
    rest = "" if not others else f", and {len(others)} other items"
    deaths = tuple(f"{QUARANTINE}/{name}: {death}" for death in dict.fromkeys(first.deaths[:_STEPS]))
    alone = (
        "run that item alone"
        if not first.replay
        else f"`rlinf why --replay {name.removesuffix('.json')}` does it again alone"
    )
    return RunFinding(
        FindingKind.LEARNING,
        "items-set-aside",
        f"{len(first.deaths)} processes died of {first.kind} {first.item}, which was set aside{rest}",
        deaths,
        (f"{alone}; what dies of it is at fault, or the item is: the run goes on without it",),
        step=first.step or None,
        time=first.time,
    )


RULES: Final = (
    numbers_are_not_finite,
    updates_are_skipped,
    observations_are_constant,
    evaluated_on_training,
    contact_differs,
    right_answers_fail,
    items_are_set_aside,
)


def _paths(facts: RunFacts, key: str) -> set[str]:
    return {str(value) for name, value in facts.config.items() if name == key or name.startswith(f"{key}[")} - {""}
