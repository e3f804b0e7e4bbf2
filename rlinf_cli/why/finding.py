"""The findings of `rlinf why`, and the table of causes, `causes.toml`."""

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
    """A failure ended the run, or restarted it."""
    INTERRUPTION = "interruption"
    """A user or a scheduler ended the run, and nothing failed."""
    STANDSTILL = "standstill"
    """The run is active, but finishes no steps."""
    LEARNING = "learning"
    """The run continues, or ended well, but does not learn, or learns something else than it should."""
    SPEED = "speed"
    """The run's steps take longer than necessary, without any fault."""
    FIGURES = "figures"
    """The run's metrics leave out requested items, or count items that are not the policy's doing."""


@dataclass(frozen=True, slots=True)
class RunFinding:
    """A cause with its evidence and remedy.

    Attributes:
        code: a stable name, as in `killed-by-signal`.
        what: the cause in one sentence.
        evidence: lines of evidence, each with its file.
        do: the remedies, each a sentence or a command.
        step: the last finished step at the time of a failure, or the first step with the sign.
        time: the time in seconds since 1970, if known.
        followed: the failures that it caused.
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
    """Return a finding, by default about learning."""
    return RunFinding(FindingKind(kind), code, what, tuple(evidence), (do,), step=step, time=time)
