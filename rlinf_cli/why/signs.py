"""Signs: metrics by which a run does not learn, and what each says, by the rows of `causes.toml`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, cast

from rlinf_cli.why import sign_rules
from rlinf_cli.why.facts import RunFacts
from rlinf_cli.why.finding import RunFinding, causes, finding
from rlinf_cli.why.sign_rules import Streak

Rule: TypeAlias = "Callable[[RunFacts], RunFinding | None]"


@dataclass(frozen=True, slots=True)
class Sign:
    """A row of the table of signs: a metric within bounds for some steps, and the cause that this shows; see there."""

    code: str
    metric: str
    bounds: tuple[float, float]
    steps: int
    what: str
    do: str
    when: str = ""
    shown: str = ""

    def __call__(self, facts: RunFacts) -> RunFinding | None:
        """Return the finding; None without the sign."""
        column = facts.column(self.metric)
        since = column.since(*self.bounds)
        if since is None or column.steps[-1] - since + 1 < self.steps:
            return None
        streak = Streak(facts, column, since, column.steps[-1])
        if self.when and not _function(self.when)(streak):
            return None
        first, value = column.values[0], column.values[-1]
        fields = {"since": since, "until": streak.until, "first": first, "value": value}
        shown = (
            f"metrics.jsonl: `{self.metric}` is {value:.3g} in step {streak.until}, and has been so since step {since}"
        )
        added = cast("Sequence[str]", _function(self.shown)(streak)) if self.shown else ()
        return finding(self.code, self.what.format(**fields), [shown, *added], self.do, since)


@cache
def signs() -> Sequence[Rule]:
    """Return the table of signs."""
    return [cast("Rule", _function(row["rule"])) if "rule" in row else Sign(**row) for row in causes()["signs"]]


def _function(name: str) -> Callable[[Any], object]:
    """Return what a row names."""
    return getattr(sign_rules, name)
