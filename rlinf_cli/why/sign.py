"""A row of the table of signs: a metric that has been within bounds for some steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlinf_cli.runs.metric_columns import MetricColumn
from rlinf_cli.why.facts import RunFacts
from rlinf_cli.why.finding import FindingKind, RunFinding


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

    @property
    def whole(self) -> bool:
        """Whether it has been so since the first step."""
        return self.since == self.column.steps[0]


@dataclass(frozen=True, slots=True)
class Sign:
    """A row of the table: a metric within bounds for some steps, and the cause that this shows.

    Texts have fields in braces: `since`, `until`, `first` and `value`, the first and the last value.

    Attributes:
        code: its stable name.
        metric: the metric's name.
        low, high: the bounds.
        steps: the number of steps at the end that must lie within them.
        what: the cause in one sentence.
        do: the remedy.
        when: what else must hold.
        shown: further evidence.
    """

    code: str
    metric: str
    low: float
    high: float
    steps: int
    what: str
    do: str
    when: Callable[[Streak], object] | None = None
    shown: Callable[[Streak], Sequence[str]] | None = None

    def __call__(self, facts: RunFacts) -> RunFinding | None:
        """Return the finding; None without the sign."""
        column = facts.column(self.metric)
        since = column.since(self.low, self.high)
        if since is None or column.steps[-1] - since + 1 < self.steps:
            return None
        streak = Streak(facts, column, since, column.steps[-1])
        if self.when is not None and not self.when(streak):
            return None
        first, value = column.values[0], column.values[-1]
        fields = {"since": since, "until": streak.until, "first": first, "value": value}
        shown = (
            f"metrics.jsonl: `{self.metric}` is {value:.3g} in step {streak.until}, and has been so since step {since}"
        )
        added = self.shown(streak) if self.shown is not None else ()
        return finding(self.code, self.what.format(**fields), [shown, *added], self.do, since)


def finding(
    code: str,
    what: str,
    evidence: Sequence[str],
    do: str,
    step: int | None = None,
    kind: FindingKind = FindingKind.LEARNING,
    time: float | None = None,
) -> RunFinding:
    """Return a finding about learning, or of another kind."""
    return RunFinding(kind, code, what, tuple(evidence), (do,), step=step, time=time)


def figures(code: str, what: str, evidence: Sequence[str], do: str) -> RunFinding:
    """Return a finding about what figures leave out."""
    return finding(code, what, evidence, do, kind=FindingKind.FIGURES)
