"""The causes of one run: what failed first, what followed, and why it does not learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlinf_cli.why.facts import RunFacts
from rlinf_cli.why.finding import RunFinding
from rlinf_cli.why.incidents import Incident, incidents
from rlinf_cli.why.rules.registry import FOLLOWS, OF_INCIDENTS, OF_LEARNING


class Diagnosis(NamedTuple):
    """The findings of `rlinf why` about a run.

    Attributes:
        failures: each failure with its incident, oldest first; those but the last sent the run back.
        learning: why it does not learn, or not what it should; root causes only.
    """

    facts: RunFacts
    failures: Sequence[tuple[Incident, RunFinding]]
    learning: Sequence[RunFinding]

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures and not self.learning

    @property
    def repeated(self) -> tuple[str, int] | None:
        """The process that failed in most of the failures, with their number, if more than one."""
        names = [incident.process.name for incident, _ in self.failures if incident.process is not None]
        counts = {name: names.count(name) for name in names}
        name = max(counts, key=counts.__getitem__, default="")
        return (name, counts[name]) if name and counts[name] > 1 else None


def diagnose(facts: RunFacts) -> Diagnosis:
    """Return the causes that the rules find in the facts about a run."""
    failures = [(incident, _named(incident)) for incident in incidents(facts)]
    findings = [finding for rule in OF_LEARNING if (finding := rule(facts)) is not None]
    codes = {finding.code for finding in findings} | {finding.code for _, finding in failures}
    implied = {follower for code in codes for follower in FOLLOWS.get(code, ())}
    ended = {finding.code for _, finding in failures}
    learning = [finding for finding in findings if finding.code not in implied | ended]
    return Diagnosis(facts, failures, learning)


def _named(incident: Incident) -> RunFinding:
    """Return what the first matching rule says; the last rule matches everything."""
    return next(finding for rule in OF_INCIDENTS if (finding := rule(incident)) is not None)
