"""The scorer of a reward worker that asks judges: models in workers of their own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from recipes.language.answers.exits import Cause, Exit
from recipes.language.config.language_config import LanguageConfig
from recipes.language.loop.order_inbox import Inbox
from recipes.language.prompts.prompt_messages import JudgeReply, JudgeRequest, judge_key, verdict_key
from recipes.language.rewards.scoring import PROGRAMS, AnswerScorer, Item, Score, Scorer
from rlinf_core import Channel

Ask = Callable[[Sequence[JudgeRequest]], Iterable[JudgeReply]]


class JudgeScorer:
    """Scores answers by asking judges; a `Scorer` by another name.

    Args:
        ask: sends requests, and returns the replies to all of them, in any order.
        sender: rank of this reward worker.
        correct: reward of a right answer.
        incorrect: reward of a wrong one.
    """

    convention = ""

    def __init__(
        self,
        ask: Ask,
        sender: int = 0,
        *,
        correct: float = 1.0,
        incorrect: float = 0.0,
    ) -> None:
        self._ask = ask
        self._sender = sender
        self._rewards = incorrect, correct
        # A worker that is started again in the place of another may still get the verdicts which that one asked for.
        self._asked = secrets.randbelow(1 << 60)

    def start(self) -> None:
        """Return: judges load their models themselves."""

    def score_all(self, items: Sequence[Item]) -> list[Score]:
        """Return the rewards of answers; one without a verdict is wrong where the judge can judge another one."""
        first = self._asked
        self._asked += len(items)
        requests = [
            JudgeRequest(first + number, self._sender, item.prompt, item.answer, item.text)
            for number, item in enumerate(items)
        ]
        replies = {reply.number: reply for reply in self._ask(requests)} if requests else {}
        return [self._score_of(replies[request.number]) for request in requests]

    def _score_of(self, reply: JudgeReply) -> Score:
        incorrect, correct = self._rewards
        if reply.right is None:
            failure, exit_ = ("", Exit.JUDGE) if reply.works else (Cause.JUDGE, "")
            return Score(incorrect, reply.reason, failure=failure, exit=exit_)
        return Score(incorrect + reply.right * (correct - incorrect), reply.reason, correct=reply.right >= 1)

    def close(self) -> None:
        """Return: judges end by themselves."""


class JudgeClient:
    """Asks the workers of the group `judge`, and waits for their verdicts.

    Args:
        channel: the channel to them and back.
        rank: the rank of this reward worker.
        judges: the number of judges.
    """

    def __init__(self, channel: Channel, rank: int, judges: int) -> None:
        self._channel = channel
        self._rank = rank
        self._judges = judges

    def __call__(self, requests: Sequence[JudgeRequest]) -> Iterator[JudgeReply]:
        """Yield the replies to requests, which are dealt to all judges."""
        for rank in range(self._judges):
            mine = tuple(requests[(rank - self._rank) % self._judges :: self._judges])
            if mine:
                self._channel.put(mine, key=judge_key(rank))
        waiting = {request.number for request in requests}
        inbox = Inbox(self._channel, verdict_key(self._rank))
        while waiting:
            replies: tuple[JudgeReply, ...] = inbox.wait()
            for reply in replies:
                waiting.discard(reply.number)
                yield reply


def make_scorer(config: LanguageConfig, ask: Callable[[], Ask], rank: int = 0) -> AnswerScorer:
    """Return the scorer of `reward.reward_type`.

    Args:
        config: the whole file.
        ask: makes what asks the judges, where there are any.
        rank: the rank of this reward worker.
    """
    reward, data = config.reward, config.data
    if reward.asks_judge:
        return JudgeScorer(ask(), rank, correct=reward.correct_reward, incorrect=reward.incorrect_reward)
    settings: dict[str, Any] | None = None
    if data.type == "reasoning_gym":
        settings = {"task": data.task, "task_config": data.task_config}
    elif reward.reward_type == PROGRAMS:
        settings = {"memory": reward.program_memory_mib << 20}
    return Scorer(
        reward.reward_type,
        correct=reward.correct_reward,
        incorrect=reward.incorrect_reward,
        timeout=reward.timeout,
        settings=settings,
    )
