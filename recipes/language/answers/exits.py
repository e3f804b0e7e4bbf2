"""Scores of answers, and bad ends of answers and agent runs, by whether the policy can have caused them.

An end that the policy can cause gives a sample, graded by the state that was reached, or 0, and counted as
`exit/<status>`. An end that it cannot have caused is left out of its group and of every mean, and counted as
`failed/<cause>`. If the two cannot be distinguished, the work is repeated once on a healthy place; a second failure is
the policy's. The page about rewards lists every end and what precedes its counting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Exit(StrEnum):
    """A bad end that the policy can cause; the answer is a sample."""

    TURNS = "turns"
    TOKENS = "tokens"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    ERROR = "error"
    CRASH = "crash"
    JUDGE = "judge"


class Cause(StrEnum):
    """A failure that the policy cannot have caused; the answer is no sample."""

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
        reward: the reward for training; for an answer that could not be scored, `incorrect_reward`, for display only.
        reason: the explanation of the score.
        parts: further metrics by name.
        failure: the `Cause` why the answer could not be scored; "" else.
        correct: whether the answer is right, regardless of training penalties.
        exit: the `Exit`, a bad end that the policy can have caused; "" else.
    """

    reward: float
    reason: str
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: str = ""
    correct: bool = False
    exit: str = ""

    @property
    def failed(self) -> bool:
        """Whether the answer could not be scored, and so is no sample."""
        return bool(self.failure)


# The exit of an answer whose scoring failed twice, while the scorer works for another answer.
EXIT_OF_SCORING: Final = {
    Cause.TIMEOUT: Exit.TIME_LIMIT,
    Cause.ERROR: Exit.ERROR,
    Cause.CRASH: Exit.CRASH,
}
