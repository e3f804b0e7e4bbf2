"""Scores of answers, and bad ends of answers and of runs of agents, which the policy can have caused or cannot.

What the policy can cause is a sample: it is graded by the state that was reached, or 0, and counted as `exit/<status>`.
What it cannot have caused is left out of its group and of every mean, and counted as `failed/<cause>`. Where the two
can't be told apart, the same is done once more on a healthy place: a second failure is the policy's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple


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


class BadEnd(NamedTuple):
    """A row of the table: the end, what happened, and what is done before it counts."""

    end: Exit | Cause
    what: str
    before: str


# The outcome of scoring that failed twice, where the scorer works for another answer.
EXIT_OF_SCORING: Final = {
    Cause.TIMEOUT: Exit.TIME_LIMIT,
    Cause.ERROR: Exit.ERROR,
    Cause.CRASH: Exit.CRASH,
}
TABLE: Final = (
    BadEnd(Exit.TURNS, "an agent has used up `agent.max_turns`", ""),
    BadEnd(Exit.TOKENS, "its conversation has no room left in `runner.seq_length`", ""),
    BadEnd(
        Exit.TIME_LIMIT,
        "a run takes longer than `agent.timeout`, a program as an answer longer than its time; scoring takes longer"
        " than `reward.timeout`",
        "scoring: once more, and another answer is scored",
    ),
    BadEnd(Exit.MEMORY_LIMIT, "a program as an answer needs more than `reward.program_memory_mib`", ""),
    BadEnd(Exit.OUTPUT_LIMIT, "a program as an answer writes more than 64 KiB", ""),
    BadEnd(
        Exit.ERROR,
        "an agent, its environment or its chat template raises after the model has spoken; a reward function raises, or"
        " gives no finite number",
        "the run or the scoring once more, and another answer is scored",
    ),
    BadEnd(
        Exit.CRASH,
        "a signal ends a program as an answer; the process that scores an answer is killed or stopped",
        "scoring: once more in another process, and another answer is scored",
    ),
    BadEnd(
        Exit.JUDGE,
        "an answer is too long for the judge, or gets no verdict",
        "an empty answer fits; asked once more, and the right answer gets a verdict",
    ),
    BadEnd(
        Cause.ENGINE,
        "an engine does not draw: a server that does not answer, or answers with 408, 425, 429 or 5xx after"
        " `rollout.server.retries`; an answer that breaks off, is no JSON, has no log-probabilities, or ends for the"
        " reason `abort` or `error`",
        "drawn once more",
    ),
    BadEnd(
        Cause.TOOL,
        "a tool or an environment cannot be reached (`ToolUnavailable`), a sandbox cannot be made, or a tool answers"
        " nobody: three different calls in a row",
        "the run once more, in a fresh environment",
    ),
    BadEnd(
        Cause.ERROR,
        "an agent or its environment raises before the model has spoken; a reward function also raises on the other"
        " answer; the sandbox of a program as an answer cannot be made",
        "the run or the scoring once more",
    ),
    BadEnd(Cause.TIMEOUT, "scoring the other answer takes too long as well", "once more"),
    BadEnd(Cause.CRASH, "a scoring process also ends on the other answer", "once more in another process"),
    BadEnd(Cause.JUDGE, "a judge's engine fails, or it judges nothing", "asked once more"),
    BadEnd(Cause.KILLED, "the task's processes die repeatedly", "alone in a process"),
)


def markdown_table() -> str:
    """Return the table as the page about rewards has it."""
    lines = ["| counted as | what | only after |", "|---|---|---|"]
    for end, what, before in TABLE:
        metric = f"exit/{end}" if isinstance(end, Exit) else f"failed/{end}"
        lines.append(f"| `{metric}` | {what} | {before} |")
    return "\n".join(lines)
