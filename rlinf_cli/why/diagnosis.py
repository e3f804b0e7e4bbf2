"""The causes of one run: what failed first, what followed, and why it does not learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rlinf_cli.why.facts import RunFacts
from rlinf_cli.why.failures import named_failure
from rlinf_cli.why.finding import FindingKind, RunFinding
from rlinf_cli.why.incidents import Incident, incidents
from rlinf_cli.why.sign_rules import SET_ASIDE
from rlinf_cli.why.signs import FOLLOWS, SIGNS
from rlinf_cli.why.slow_steps import slow_steps


class Diagnosis(NamedTuple):
    """The findings of `rlinf why` about a run.

    Attributes:
        failures: each failure with its incident, oldest first; those but the last sent the run back.
        learning: why it does not learn, or not what it should; root causes only.
        restarts: the incidents after which processes were started again.
        speed: what its steps wait for, where that is more than the error of a prediction; nothing is wrong then.
    """

    facts: RunFacts
    failures: Sequence[tuple[Incident, RunFinding]]
    learning: Sequence[RunFinding]
    restarts: Sequence[Incident] = ()
    speed: Sequence[RunFinding] = ()

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures and not self.learning

    @property
    def repeated(self) -> tuple[str, int] | None:
        """The process that failed in most of the failures, with their number, if more than one."""
        others = (incident for incident, finding in self.failures if finding.code != SET_ASIDE)
        names = [incident.process.name for incident in others if incident.process is not None]
        counts = {name: names.count(name) for name in names}
        name = max(counts, key=counts.__getitem__, default="")
        return (name, counts[name]) if name and counts[name] > 1 else None


def diagnose(facts: RunFacts) -> Diagnosis:
    """Return the causes that the rules find in the facts about a run."""
    failures = [(incident, named_failure(incident)) for incident in incidents(facts)]
    findings = [finding for rule in SIGNS if (finding := rule(facts)) is not None]
    codes = {finding.code for finding in findings} | {finding.code for _, finding in failures}
    implied = {follower for code in codes for follower in FOLLOWS.get(code, ())}
    ended = {finding.code for _, finding in failures}
    learning = [finding for finding in findings if finding.code not in implied | ended]
    restarts = [incident for incident, _ in failures if incident.alone or incident.restarted]
    return Diagnosis(facts, *_items_first(facts, failures, learning), restarts, slow_steps(facts))


def _items_first(
    facts: RunFacts, failures: Sequence[tuple[Incident, RunFinding]], learning: Sequence[RunFinding]
) -> tuple[list[tuple[Incident, RunFinding]], list[RunFinding]]:
    """Return failures and findings with an item that was set aside in the place of the deaths that it caused."""
    aside = next((finding for finding in learning if finding.code == SET_ASIDE), None)
    deaths = [death for item in facts.quarantined.values() for death in item.deaths]
    caused = [pair for pair in failures if any(_tells_of(pair[0], death) for death in deaths)]
    if aside is None or not caused:
        return list(failures), list(learning)
    incident, _ = caused[0]
    followed = tuple(f"{finding.what}, after step {finding.step}" for _, finding in caused)
    first = replace(aside, kind=FindingKind.FAILURE, followed=followed, step=incident.step)
    kept = [
        (incident, first) if pair is caused[0] else pair for pair in failures if pair is caused[0] or pair not in caused
    ]
    return kept, [finding for finding in learning if finding is not aside]


def _tells_of(incident: Incident, death: str) -> bool:
    """Return whether a death that was noted of an item is that of an incident."""
    return bool(death) and not incident.ended and death in incident.text
