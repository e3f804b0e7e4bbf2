"""Figures that are not of all that was asked for, and errors of environments that count as failures."""

from __future__ import annotations

import math
from typing import Final

from rlinf_cli.why.facts import RunFacts
from rlinf_cli.why.finding import FindingKind, RunFinding
from rlinf_core.runners.storage import run_events

_FAILED: Final = "failed/"
_LEFT_OUT: Final = "eval/left_out"
_CUT: Final = 0.9


def left_out(facts: RunFacts) -> RunFinding | None:
    """Find episodes or answers that were left out of evaluations or of training."""
    sums = {name: _total(facts, name) for name in facts.columns if name == _LEFT_OUT or name.startswith(_FAILED)}
    lost = {name: count for name, count in sums.items() if count}
    if not lost:
        return None
    counted = facts.column("eval/episodes", "eval/answers")
    missing = facts.column(_LEFT_OUT)
    shown = [f"metrics.jsonl: `{name}` adds up to {count:.0f} over the run" for name, count in lost.items()]
    if _LEFT_OUT not in lost:
        what = f"{sum(lost.values()):.0f} episodes or answers were left out of training, for no fault of the policy"
        return _finding("left-out", what, shown, "look at their causes in the logs of the workers")
    of = zip(missing.steps, missing.values, counted.values, strict=False)
    step, last, kept = [evaluation for evaluation in of if evaluation[1]][-1]
    what = f"evaluations are incomplete: {last:.0f} of {last + kept:.0f} were left out after step {step}"
    do = "mend what failed (the logs of the workers have it): what is left out may be worse than the rest"
    return _finding("evaluation-incomplete", what, shown, do)


def environment_raises(facts: RunFacts) -> RunFinding | None:
    """Find errors in the code of environments, of which episodes counted as failed."""
    events = [event for event in facts.story if event.kind == run_events.ENVIRONMENT]
    count = _total(facts, "eval/env_errors") + _total(facts, "env/env_errors")
    if not events or not count:
        return None
    shown = [f"events.jsonl: {event.text}" for event in events]
    what = f"the environment has an error in its code, by which {count:.0f} episodes count as failed: {events[0].text}"
    return _finding("environment-raises", what, shown, "mend that line: the same seed and actions raise there again")


def evaluated_answers_are_cut(facts: RunFacts) -> RunFinding | None:
    """Find that nearly all answers of the last evaluation end at the limit of tokens."""
    cut, answers = facts.column("eval/cut_off"), facts.column("eval/answers")
    if not len(cut) or not len(answers) or cut.values[-1] < max(1.0, _CUT * answers.values[-1]):
        return None
    count = f"{cut.values[-1]:.0f} of {answers.values[-1]:.0f}"
    return _finding(
        "answers-truncated",
        f"{count} answers of the last evaluation are cut off at the limit of tokens before they end",
        [f"metrics.jsonl: `eval/cut_off` is {cut.values[-1]:.0f} in step {cut.steps[-1]}"],
        "raise `rollout.sampling_params.max_new_tokens`, or see that the model knows its token of the end",
    )


RULES: Final = (environment_raises, left_out, evaluated_answers_are_cut)


def _total(facts: RunFacts, name: str) -> float:
    return sum(value for value in facts.column(name).values if math.isfinite(value))


def _finding(code: str, what: str, shown: list[str], do: str) -> RunFinding:
    return RunFinding(FindingKind.FIGURES, code, what, tuple(shown), (do,))
