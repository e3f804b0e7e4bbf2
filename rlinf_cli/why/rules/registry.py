"""All rules of `rlinf why`, and what one finding says of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from rlinf_cli.why.finding import Rule, RunFinding
from rlinf_cli.why.incidents import Incident
from rlinf_cli.why.rules import deaths, endings, errors, evaluations, inputs, policy, rewards, weights

IncidentRule: TypeAlias = Callable[[Incident], RunFinding | None]

# The first that matches a failure names it; the last one always does.
OF_INCIDENTS: Final[Sequence[IncidentRule]] = (*endings.RULES, *deaths.RULES, *errors.RULES)
OF_LEARNING: Final[Sequence[Rule]] = (
    *inputs.RULES,
    *rewards.RULES,
    *weights.RULES,
    *policy.RULES,
    *evaluations.RULES,
)

# What follows from a cause is not a second one.
FOLLOWS: Final[Mapping[str, frozenset[str]]] = {
    "reward-never-varies": frozenset({"groups-equal", "advantages-constant", "no-gradient", "policy-does-not-change"}),
    "right-answers-fail": frozenset({"reward-never-varies", "groups-equal", "reward-fails"}),
    "groups-equal": frozenset({"advantages-constant", "no-gradient", "policy-does-not-change"}),
    "advantages-constant": frozenset({"no-gradient", "policy-does-not-change"}),
    "learning-rate-zero": frozenset({"updates-rounded-away", "policy-does-not-change"}),
    "updates-rounded-away": frozenset({"policy-does-not-change"}),
    "no-gradient": frozenset({"policy-does-not-change"}),
    "answers-truncated": frozenset({"reward-never-varies", "groups-equal"}),
    "reward-fails": frozenset({"reward-never-varies", "groups-equal", "reward-collapsed", "left-out"}),
    "not-finite": frozenset({"reward-collapsed"}),
    "updates-skipped": frozenset({"not-finite"}),
    "engine-has-other-weights": frozenset({"all-clipped", "policy-jumps", "reward-collapsed"}),
    "policy-jumps": frozenset({"all-clipped", "entropy-collapsed", "reward-collapsed"}),
    "entropy-collapsed": frozenset({"reward-collapsed", "groups-equal", "advantages-constant", "no-gradient"}),
    "gradients-clipped-away": frozenset({"updates-rounded-away", "policy-does-not-change"}),
    "items-set-aside": frozenset({"reward-fails"}),
}
