"""Answers to one prompt on their way to scoring; torch-free, for processes that do not need torch."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.data.problems import Problem
from recipes.language.loop.generation import ANSWERS
from recipes.language.prompts.prompt_messages import Prompt
from rlinf_core import Channel


class TurnRecord(NamedTuple):
    """A turn of a conversation, as a person reads it.

    Attributes:
        who: the author of the turn; `reward` for the reward of a turn of the model.
        text: what was said, or the reward.
        tool: name of the tool.
        seconds: the seconds that the turn took.
        failure: `error` or `timeout` of a tool; "" else.
        segment: number of the segment of the trajectory.
    """

    who: Literal["task", "model", "tool", "reward"]
    text: str
    tool: str = ""
    seconds: float = 0.0
    failure: str = ""
    segment: int = 0


class EpisodeStats(NamedTuple):
    """The result of a multi-turn answer.

    Attributes:
        reward: set by the agent; None: the text is scored like any other.
        reason: the reason for that reward.
        parts: named parts of it.
        failure: the `Cause` of a failure that makes it no sample; "" else.
        turns: what was said.
        figures: metrics by their full names, whose means are reported.
        correct: whether the answer is right; None: when its reward is at least `reward.correct_reward`.
        exit: the bad end that the policy can have caused, an `Exit`; "" else.
    """

    reward: float | None = None
    reason: str = ""
    parts: Mapping[str, float] = {}
    failure: str = ""
    turns: tuple[TurnRecord, ...] = ()
    figures: Mapping[str, float] = {}
    correct: bool | None = None
    exit: str = ""


class AnswerGroup(NamedTuple):
    """The answers to one prompt, on their way to be scored.

    Attributes:
        prompt: the prompt that was answered.
        problem: number of the problem in its set.
        question: the problem.
        texts: the answers without the tokens that end them; empty for a prompt that was skipped.
        answers: the sequences; where a trajectory branched its segments, next to each other, with its number.
        pieces: text of each token, by answer; empty unless they are shown.
        episode_stats: the metrics of each trajectory; empty where answers are of one turn.
    """

    prompt: Prompt
    problem: int
    question: Problem
    texts: tuple[str, ...]
    answers: tuple[Answer, ...]
    pieces: tuple[tuple[str, ...], ...] = ()
    episode_stats: tuple[EpisodeStats, ...] = ()

    @property
    def trajectories(self) -> list[list[Answer]]:
        """The sequences of each trajectory, by number."""
        by_sample: dict[int, list[Answer]] = {}
        for answer in self.answers:
            by_sample.setdefault(answer.sample, []).append(answer)
        return list(by_sample.values())


def put_groups(channel: Channel, groups: Sequence[AnswerGroup], rewards: int, *, streams: bool) -> None:
    """Hand groups to the reward workers, in one message to each: a message costs more than most scores.

    Args:
        channel: the channel to the reward workers.
        groups: the groups that are whole.
        rewards: the number of reward workers.
        streams: whether the group never stops, so that any reward worker may take any group.
    """
    shares: list[list[AnswerGroup]] = [[] for _ in range(rewards)]
    for number, group in enumerate(groups):
        shares[(number if streams else group.prompt.slot) % rewards].append(group)
    for rank, share in enumerate(shares):
        if share:
            channel.put(share, key=ANSWERS if streams else str(rank))


class KeptGroups:
    """Answers of the present step, for reward workers that take the place of dead ones.

    Args:
        keeps: whether any are kept; else all of them are lost with a reward worker.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._step = 0
        # Pickled, which takes a quarter of the memory.
        self._groups: dict[int, bytes] = {}

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Forget the answers of evaluations and of all steps except that of `prompts`, which belong to one step."""
        if prompts and not (prompts[0].trains and prompts[0].step == self._step):
            self._step = prompts[0].step
            self._groups.clear()

    def add(self, groups: Sequence[AnswerGroup]) -> None:
        """Keep groups that are whole."""
        if self._keeps:
            self._groups |= {group.prompt.slot: pickle.dumps(group) for group in groups}

    def of(self, slots: Collection[int]) -> list[AnswerGroup]:
        """Return the groups of these slots, as far as they are here."""
        wanted = [content for slot, content in self._groups.items() if slot in slots]
        return [pickle.loads(content) for content in wanted]  # noqa: S301 - pickled above
