"""The names and sizes that the workers of a language model's job share."""

from __future__ import annotations

from typing import NamedTuple


class LanguageLayout(NamedTuple):
    """The groups of a job and the channels between them.

    Attributes:
        actors, rollouts, rewards: processes of each group.
        answers: channel from rollout to reward workers; the key is the rank of the reward worker.
        scored: channel from reward to actor workers; the key is a group's number in its batch.
    """

    actors: int
    rollouts: int
    rewards: int
    answers: str
    scored: str


class GroupReport(NamedTuple):
    """The facts about the answers to one prompt that the runner knows.

    Attributes:
        slot: number of the group in its batch.
        problem: number of the problem in its set.
        source: name of that set.
        difficulty: label of the problem, or "".
        tokens: of all sequences, prompts included.
        rewards: of each answer.
        lengths: tokens of each answer.
        truncated: how many answers ended at their limit.
        failures: answers that could not be scored, by kind.
        parts: sums of named parts of rewards.
        oldest, newest: versions of the weights that drew the tokens.
        skipped: whether the prompt was longer than the limit; it has no answers then.
    """

    slot: int
    problem: int
    source: str
    difficulty: str
    tokens: int
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: int
    failures: dict[str, int]
    parts: dict[str, float]
    oldest: int
    newest: int
    skipped: bool = False


class SampleRecord(NamedTuple):
    """An answer as a person reads it; a line of `samples/step_N.jsonl`. `pieces` are the texts of its tokens."""

    slot: int
    sample: int
    prompt: str
    text: str
    answer: str
    reward: float
    reason: str
    finish_reason: str
    parts: dict[str, float]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    pieces: tuple[str, ...] = ()
