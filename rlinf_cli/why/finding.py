"""A cause that `rlinf why` names, the type of the rules that find one, and a row of the table of signs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from rlinf_cli.runs.metric_columns import MetricColumn
from rlinf_cli.why.facts import RunFacts

if TYPE_CHECKING:
    from rlinf_cli.why.facts import RunFacts


class FindingKind(StrEnum):
    """The kind of a finding."""

    FAILURE = "failure"
    """It ended the run, or sent it back."""
    INTERRUPTION = "interruption"
    """Somebody ended the run, and nothing failed."""
    STANDSTILL = "standstill"
    """The run is active, and finishes no steps."""
    LEARNING = "learning"
    """The run goes on, or ended well, and does not learn, or not what it should."""
    SPEED = "speed"
    """Its steps take longer than they need; nothing is wrong."""
    FIGURES = "figures"
    """Its figures are not of all that was asked for, or count what the policy has not done."""


@dataclass(frozen=True, slots=True)
class RunFinding:
    """A cause, with its evidence and the remedy.

    Attributes:
        code: a stable name, as in `killed-by-signal`.
        what: the cause in one sentence.
        evidence: what shows it, each with the file that has it.
        do: the remedy; one sentence or command each.
        step: the last finished step then, or the first at which it shows.
        time: the time in seconds since 1970, if known.
        followed: what failed because of it.
    """

    kind: FindingKind
    code: str
    what: str
    evidence: tuple[str, ...]
    do: tuple[str, ...]
    step: int | None = None
    time: float | None = None
    followed: tuple[str, ...] = ()


Rule: TypeAlias = "Callable[[RunFacts], RunFinding | None]"


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
