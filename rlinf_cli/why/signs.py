"""Signs that a run does not learn, described by the rows of `causes.toml`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlinf_cli.why import sign_rules
from rlinf_cli.why.facts import RunFacts
from rlinf_cli.why.finding import FindingKind, RunFinding, causes, finding
from rlinf_cli.why.sign_rules import Streak


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
        return finding(self.code, what, lines, do, fields.get("since"), self.kind, fields.get("time"))

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
    return getattr(sign_rules, name)
