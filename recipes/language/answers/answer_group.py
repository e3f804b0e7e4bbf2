"""Answers to one prompt on their way to scoring; torch-free, for processes that do not need torch."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from recipes.language.answers.prompt_messages import ANSWERS, GroupReport, Prompt
from recipes.language.answers.sequences import Cause, Score
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.data.problems import Problem
from rlinf_core import Channel


class TurnRecord(NamedTuple):
    """A turn of a conversation, for people to read.

    Attributes:
        who: the author of the turn; `reward` marks the reward of a model's turn.
        text: the message, or the reward.
        tool: the name of the tool.
        seconds: the duration of the turn.
        failure: `error` or `timeout` of a tool; "" else.
        segment: the number of the trajectory's segment.
    """

    who: Literal["task", "model", "tool", "reward"]
    text: str
    tool: str = ""
    seconds: float = 0.0
    failure: str = ""
    segment: int = 0


class Rollout(NamedTuple):
    """An answer to a prompt: one turn, or an agent's run of many.

    Attributes:
        segments: the token sequences; several if the trajectory branched.
        text: the answer without the token that ends it.
        pieces: the text of each token; empty unless samples show it.
        score: the score of the answer, which an agent may set; None: `text` is to be scored.
        turns: the turns of an agent's run.
        figures: metrics of an agent's run by their full names; their means are reported.
        exit: the `Exit` of an agent's run, a bad end that the policy can have caused; "" else.
    """

    segments: tuple[Answer, ...]
    text: str = ""
    pieces: tuple[str, ...] = ()
    score: Score | None = None
    turns: tuple[TurnRecord, ...] = ()
    figures: Mapping[str, float] = {}
    exit: str = ""

    @property
    def failure(self) -> str:
        """The cause that keeps the answer from being a sample; "" if it is a sample or not scored yet."""
        return self.score.failure if self.score else ""

    @property
    def unanswered(self) -> str:
        """The reason why the engine did not answer; "" if it did."""
        return next((segment.failure for segment in self.segments if segment.failed), "")

    @property
    def tokens(self) -> list[int]:
        """The tokens of all segments."""
        return [token for segment in self.segments for token in segment.tokens]

    @property
    def drawn(self) -> int:
        """Number of tokens that the model drew."""
        return sum(segment.drawn for segment in self.segments)


class AnswerGroup(NamedTuple):
    """The answers to one prompt.

    Attributes:
        prompt: the prompt that was answered.
        problem: the number of the problem in its data set.
        question: the problem itself.
        rollouts: the answers in order; empty for a skipped prompt.
    """

    prompt: Prompt
    problem: int
    question: Problem
    rollouts: tuple[Rollout, ...] = ()

    @property
    def answers(self) -> list[Answer]:
        """The sequences of all answers; segments of a trajectory are adjacent."""
        return [segment for rollout in self.rollouts for segment in rollout.segments]

    @property
    def unscored(self) -> list[Rollout]:
        """The answers whose text is to be scored: completed by the engine and not scored by an agent."""
        return [rollout for rollout in self.rollouts if rollout.score is None and not rollout.unanswered]

    @property
    def scored(self) -> list[tuple[Rollout, Score]]:
        """The answers that could be scored, with their scores."""
        return [(one, one.score) for one in self.rollouts if one.score and not one.score.failed]

    def scores(self, judged: Iterable[Score], incorrect: float) -> list[Score]:
        """Return the score of each answer; answers that the engine did not give get `Cause.ENGINE`.

        Args:
            judged: the scores of `unscored`.
            incorrect: the reward of an answer that the engine did not give.
        """
        rest = iter(judged)
        return [
            Score(incorrect, one.unanswered, failure=Cause.ENGINE) if one.unanswered else one.score or next(rest)
            for one in self.rollouts
        ]

    def with_scores(self, scores: Iterable[Score]) -> AnswerGroup:
        """Return the group with these scores of its answers."""
        pairs = zip(self.rollouts, scores, strict=True)
        return self._replace(rollouts=tuple(rollout._replace(score=score) for rollout, score in pairs))

    def report(self) -> GroupReport:
        """Return statistics of the answers, regardless of whether they are trained on."""
        scored, scores = self.scored, [rollout.score for rollout in self.rollouts if rollout.score]
        parts, figures = Counter[str](), Counter[str]()
        for rollout, score in scored:
            parts.update(score.parts)
            figures.update(rollout.figures)
        segments = [segment for rollout, _ in scored for segment in rollout.segments]
        versions = [version for segment in segments for version in segment.drawn_versions]
        return GroupReport(
            slot=self.prompt.slot,
            step=self.prompt.step,
            problem=self.problem,
            source=self.question.source,
            difficulty=self.question.difficulty,
            tokens=sum(len(segment.prompt) + len(segment.tokens) for segment in segments),
            rewards=tuple(score.reward for _, score in scored),
            lengths=tuple(rollout.drawn for rollout, _ in scored),
            truncated=sum(any(one.finish_reason == "length" for one in rollout.segments) for rollout, _ in scored),
            failures=dict(Counter(str(score.failure) for score in scores if score.failed)),
            exits=dict(Counter(str(score.exit) for _, score in scored if score.exit)),
            parts=dict(parts),
            oldest=min(versions, default=0),
            version_sum=sum(versions),
            skipped=not self.rollouts,
            figures=dict(figures),
            corrects=tuple(score.correct for _, score in scored),
            failure=next((score.reason for score in scores if score.failed), ""),
        )

    def lines(self) -> tuple[dict[str, Any], ...]:
        """Return the scored answers as lines of `samples/step_N.jsonl`, for people to read."""
        return tuple(self._line(rollout, rollout.score) for rollout in self.rollouts if rollout.score)

    def _line(self, rollout: Rollout, score: Score) -> dict[str, Any]:
        # `turns` shows a whole conversation; token columns show its longest segment only.
        answer = max(rollout.segments, key=lambda segment: len(segment.prompt) + len(segment.tokens))
        return {
            "slot": self.prompt.slot,
            "sample": answer.sample,
            "prompt": self.question.prompt,
            "text": rollout.text,
            "answer": self.question.answer,
            "reward": score.reward,
            "reason": score.reason,
            "finish_reason": answer.finish_reason,
            "parts": dict(score.parts),
            "tokens": answer.tokens,
            "logprobs": answer.logprobs,
            "versions": answer.versions,
            "pieces": rollout.pieces,
            "turns": tuple(turn._asdict() for turn in rollout.turns),
        }


class GroupOutlet:
    """The sender of groups to the reward workers. It keeps the current step's groups, to resend them to a replaced
    worker.

    Args:
        channel: the channel to the reward workers.
        rewards: the number of reward workers.
        keeps: whether groups are kept for resending.

    Attributes:
        streams: whether generation never stops; any reward worker may then take any group, and no group is kept.
    """

    def __init__(self, channel: Channel, rewards: int, *, keeps: bool) -> None:
        self._channel = channel
        self._rewards = rewards
        self._keeps = keeps
        self._step = 0
        # Pickled groups take a quarter of the memory.
        self._groups: dict[int, bytes] = {}
        self.streams = False

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Forget all kept groups unless `prompts` train in the step of these groups."""
        if prompts and not (prompts[0].trains and prompts[0].step == self._step):
            self._step = prompts[0].step
            self._groups.clear()

    def put(self, groups: Sequence[AnswerGroup]) -> None:
        """Send finished groups, in one message to each worker: a message costs more than most scores."""
        if self._keeps and not self.streams:
            self._groups |= {group.prompt.slot: pickle.dumps(group) for group in groups}
        self._send(groups)

    def put_again(self, slots: Collection[int]) -> tuple[int, ...]:
        """Resend the kept groups of these slots, and return their slots."""
        wanted = [content for slot, content in self._groups.items() if slot in slots]
        groups: list[AnswerGroup] = [pickle.loads(content) for content in wanted]  # noqa: S301 - pickled above
        self._send(groups)
        return tuple(group.prompt.slot for group in groups)

    def _send(self, groups: Sequence[AnswerGroup]) -> None:
        shares: list[list[AnswerGroup]] = [[] for _ in range(self._rewards)]
        for number, group in enumerate(groups):
            shares[(number if self.streams else group.prompt.slot) % self._rewards].append(group)
        for rank, share in enumerate(shares):
            if share:
                self._channel.put(share, key=ANSWERS if self.streams else str(rank))
