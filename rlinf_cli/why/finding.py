"""A cause that `rlinf why` names, and the type of the rules that find one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

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
