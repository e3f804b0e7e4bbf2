"""Messages between reward workers and the workers that judge by a model."""

from __future__ import annotations

from typing import NamedTuple


class JudgeRequest(NamedTuple):
    """An answer to judge.

    Attributes:
        number: comes back with the reply; given by the process that asks.
        sender: rank of the reward worker that asks.
        prompt, answer, text: the question, the right answer, and the answer to judge.
    """

    number: int
    sender: int
    prompt: str
    answer: str
    text: str


class JudgeReply(NamedTuple):
    """A verdict.

    Attributes:
        number: the number of the request.
        right: 0 to 1; None where there is no verdict.
        reason: the end of what the judge said; or why there is no verdict.
        works: whether the judge can judge another answer, so that there is no verdict because of this one.
    """

    number: int
    right: float | None
    reason: str
    works: bool = False


def judge_key(rank: int) -> str:
    """Return the channel key of requests to a judge."""
    return f"judge:{rank}"


def verdict_key(rank: int) -> str:
    """Return the channel key of verdicts for a reward worker."""
    return f"verdicts:{rank}"
