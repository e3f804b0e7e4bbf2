"""A cause that `rlinf why` names, and the table of causes, `causes.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

_TABLE: Final = Path(__file__).with_name("causes.toml")


@cache
def causes() -> dict[str, Any]:
    """Return the table of causes."""
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


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


def finding(
    code: str,
    what: str,
    evidence: Sequence[str],
    do: str,
    step: int | None = None,
    kind: str = FindingKind.LEARNING,
    time: float | None = None,
) -> RunFinding:
    """Return a finding about learning, or of another kind."""
    return RunFinding(FindingKind(kind), code, what, tuple(evidence), (do,), step=step, time=time)
