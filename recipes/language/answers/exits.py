"""Scores of answers, and bad ends of answers and of runs of agents, which the policy can have caused or cannot.

What the policy can cause is a sample: it is graded by the state that was reached, or 0, and counted as `exit/<status>`.
What it cannot have caused is left out of its group and of every mean, and counted as `failed/<cause>`. Where the two
can't be told apart, the same is done once more on a healthy place: a second failure is the policy's. The page
about rewards says of each end what happened, and what is done before it counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Exit(StrEnum):
    """A bad end that the policy can cause; a sample."""

    TURNS = "turns"
    TOKENS = "tokens"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    ERROR = "error"
    CRASH = "crash"
    JUDGE = "judge"


class Cause(StrEnum):
    """A failure that the policy cannot have caused; no sample."""

    ENGINE = "engine"
    TOOL = "tool"
    ERROR = "error"
    TIMEOUT = "timeout"
    CRASH = "crash"
    JUDGE = "judge"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class Score:
    """The score of an answer: right, wrong, or failed.

    Attributes:
        reward: the reward for training; `incorrect_reward`, for people alone, where it could not be scored.
        reason: what it was judged by.
        parts: further metrics by name.
        failure: the `Cause` of a failure for which it could not be scored; "" else.
        correct: whether the answer is right; no penalty of training changes that.
        exit: the bad end that the policy can have caused, an `Exit`; "" else.
    """

    reward: float
    reason: str
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: str = ""
    correct: bool = False
    exit: str = ""

    @property
    def failed(self) -> bool:
        """Whether the answer could not be scored: it is not a sample then."""
        return bool(self.failure)


# The outcome of scoring that failed twice, where the scorer works for another answer.
EXIT_OF_SCORING: Final = {
    Cause.TIMEOUT: Exit.TIME_LIMIT,
    Cause.ERROR: Exit.ERROR,
    Cause.CRASH: Exit.CRASH,
}
