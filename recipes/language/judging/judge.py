"""A model that judges answers, with its engine; and the scorers of reward workers that ask one."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from recipes.language.answers.exits import Cause, Exit, Score
from recipes.language.answers.sequences import Request, SamplingParams
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.config.described_models import judge_job
from recipes.language.config.language_config import LanguageConfig
from recipes.language.data.problems import Problem
from recipes.language.data.prompts import PromptEncoder
from recipes.language.data.text_tokens import without_thought
from recipes.language.engines.registry import make_engine
from recipes.language.loop.order_inbox import Inbox
from recipes.language.models.load_model import make_tokenizer, stop_token_ids
from recipes.language.prompts.prompt_messages import JudgeReply, JudgeRequest, judge_key, verdict_key
from recipes.language.rewards.scoring import PROGRAMS, AnswerScorer, Item, Scorer, StandInScorer
from recipes.language.templates.chat_template import TemplateRefusalError
from rlinf_core import Channel
from rlinf_core.process import pacing
from rlinf_core.registry import import_target
from rlinf_core.runners.storage.first_contact import FirstContact
from rlinf_core.suggest import excerpt

# Replies to one answer that are drawn before the right answer is judged instead, to see whether the judge judges.
_TRIES: Final = 2
# A greedy reply without a verdict would be drawn again as it was.
_SECOND_TEMPERATURE: Final = 1.0
_SHOWN: Final = 120


class Judge:
    """A model that judges answers, with its engine.

    Args:
        config: the whole file.
        device: where the model is.
        contact: keeps what it is compared with.
        owner: the worker whose engine it is, for errors.

    Raises:
        ConfigError: the model or the verdict's function cannot be loaded, or the engine's package is missing.
    """

    def __init__(
        self, config: LanguageConfig, device: torch.device, contact: FirstContact | None = None, owner: str = "judge"
    ) -> None:
        judge, job = config.judge, judge_job(config)
        tokenizer = make_tokenizer(job.actor)
        self._encoder = PromptEncoder(
            tokenizer,
            apply_chat_template=judge.apply_chat_template,
            system_prompt=judge.system_prompt,
            template_arguments=judge.chat_template_kwargs,
        )
        self._template = judge.template or TEMPLATES[judge.verdict]
        self._verdict = verdict_rule(judge.verdict)
        self._params = SamplingParams(temperature=judge.temperature, max_new_tokens=judge.max_new_tokens)
        self._room = judge.seq_length - judge.max_new_tokens
        self.engine = make_engine(job, tokenizer, stop_token_ids(tokenizer, judge.model_path), device, contact, owner)
        # Requests that are being judged, by the engine's name for them: how often each was tried, and why in vain.
        self._open: dict[str, tuple[JudgeRequest, int, str]] = {}

    def submit(self, requests: Iterable[JudgeRequest]) -> list[tuple[JudgeRequest, JudgeReply]]:
        """Begin to judge answers, and return those that cannot be asked about."""
        refused: list[tuple[JudgeRequest, JudgeReply]] = []
        for request in requests:
            tokens = self._encoded(request, without_thought(request.text))
            if isinstance(tokens, str):
                # An answer that is too long is its own fault; a question that is too long without one is not.
                fits = not isinstance(self._encoded(request, ""), str)
                refused.append((request, JudgeReply(request.number, None, tokens, works=fits)))
                continue
            name = f"{request.sender}:{request.number}"
            self._open[name] = request, 1, ""
            self.engine.submit(Request(request_id=name, prompt=tokens, params=self._params))
        return refused

    def _encoded(self, request: JudgeRequest, text: str) -> tuple[int, ...] | str:
        """Return the tokens that ask about an answer; or why the judge cannot be asked."""
        asked = filled(self._template, prompt=request.prompt, answer=request.answer, text=text)
        try:
            tokens = self._encoder.encode(Problem(prompt=asked, answer=""))
        except TemplateRefusalError as refusal:
            return f"the judge cannot be asked: {refusal.reason}"
        if not tokens or len(tokens) > self._room:
            return f"the judge cannot be asked: its prompt has more than {self._room} tokens"
        return tuple(tokens)

    def read(self, answers: Iterable[Answer]) -> list[tuple[JudgeRequest, JudgeReply]]:
        """Return the verdicts in replies that ended; those that have none are drawn again."""
        replies: list[tuple[JudgeRequest, JudgeReply]] = []
        for answer in answers:
            request, tries, earlier = self._open.pop(answer.request_id)
            right, reason = self._read(answer)
            if tries > _TRIES:
                replies.append((request, JudgeReply(request.number, None, earlier, works=right is not None)))
                continue
            prompt, params = answer.prompt, self._params
            if tries < _TRIES:
                params = replace(params, temperature=params.temperature or _SECOND_TEMPERATURE, seed=tries)
            else:
                known = self._encoded(request, request.answer)
                prompt = () if isinstance(known, str) or answer.failed else known
            if right is not None or not prompt:
                replies.append((request, JudgeReply(request.number, right, reason)))
                continue
            self._open[answer.request_id] = request, tries + 1, reason
            self.engine.submit(Request(request_id=answer.request_id, prompt=prompt, params=params))
        return replies

    def _read(self, answer: Answer) -> tuple[float | None, str]:
        """Return the verdict of a reply, and what it says or why it has none."""
        if answer.failed:
            return None, f"the judge's engine failed: {answer.failure}"
        text = self._encoder.text(answer.tokens)
        try:
            right = self._verdict(text)
        except Exception as error:  # noqa: BLE001 - a function of the user's
            return None, f"`judge.verdict` failed: {type(error).__name__}: {error}"
        shown = excerpt(text[-_SHOWN:], _SHOWN)
        if right is None:
            return None, f"the judge gave no verdict: `{shown}`"
        if not (math.isfinite(right) and 0 <= right <= 1):
            return None, f"the verdict is {right:g}, which is not from 0 to 1"
        return right, f"judge: `{shown}`"

    def results(self, requests: Sequence[JudgeRequest]) -> Iterator[JudgeReply]:
        """Judge answers, and yield their verdicts as they come."""
        for _, reply in self.submit(requests):
            yield reply
        while self._open:
            for _, reply in self.read(self.engine.step()):
                yield reply


# From the text of a judge to a number from 0 to 1; None where there is no verdict in it.
VerdictRule = Callable[[str], float | None]

_CORRECT: Final = re.compile(r"verdict\W*\b(correct|incorrect)\b", re.IGNORECASE)
_SCORE: Final = re.compile(r"score\W*?(\d+(?:\.\d+)?)(?![\d.]*\d)", re.IGNORECASE)
_HIGHEST: Final = 10.0
_PLACE: Final = re.compile(r"\{(prompt|answer|text)\}")
_CASE: Final = """\
Question:
{prompt}

Reference answer:
{answer}

Answer to judge:
{text}

"""
TEMPLATES: Final[Mapping[str, str]] = {
    "correct": _CASE
    + "Does the answer to judge give the result of the reference answer? Think briefly, and end with the line"
    " `Verdict: CORRECT` or the line `Verdict: INCORRECT`.",
    "score": _CASE
    + "How good is the answer to judge, from 0 (useless) to 10 (as good as the reference answer)? Think briefly, and"
    " end with the line `Score: N`.",
}


def filled(template: str, *, prompt: str, answer: str, text: str) -> str:
    """Return the prompt of a judge; places that stand in what is filled in remain as they are."""
    values = {"prompt": prompt, "answer": answer, "text": text}
    return _PLACE.sub(lambda place: values[place[1]], template)


def correct(text: str) -> float | None:
    """Return 1 or 0 by the last `Verdict: CORRECT` or `Verdict: INCORRECT`."""
    verdicts = _CORRECT.findall(without_thought(text))
    return float(verdicts[-1].lower() == "correct") if verdicts else None


def score(text: str) -> float | None:
    """Return the last `Score: N`, from 0 to 10, as a share of 10."""
    scores = [float(number) for number in _SCORE.findall(without_thought(text))]
    return scores[-1] / _HIGHEST if scores and scores[-1] <= _HIGHEST else None


def verdict_rule(name: str) -> VerdictRule:
    """Return the rule of `judge.verdict`: `correct`, `score`, or a user's function.

    Raises:
        ConfigError: the function cannot be imported, or called.
    """
    if ":" not in name:
        return {"correct": correct, "score": score}[name]
    function: Any = import_target(name, "verdict")

    def checked(text: str) -> float | None:
        value: Any = function(text)
        return None if value is None else float(value)

    return checked


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


def ask_judges(channel: Channel, rank: int, judges: int, requests: Sequence[JudgeRequest]) -> Iterator[JudgeReply]:
    """Yield the replies to requests of a reward worker, which are dealt to all workers of the group `judge`.

    Args:
        channel: the channel to them and back.
        rank: the rank of the reward worker.
        judges: the number of judges.
        requests: the requests.
    """
    for judge in range(judges):
        mine = tuple(requests[(judge - rank) % judges :: judges])
        if mine:
            channel.put(mine, key=judge_key(judge))
    waiting = {request.number for request in requests}
    inbox = Inbox(channel, verdict_key(rank))
    while waiting:
        replies: tuple[JudgeReply, ...] = inbox.wait()
        for reply in replies:
            waiting.discard(reply.number)
            yield reply


def make_scorer(config: LanguageConfig, ask: Callable[[], Ask], rank: int = 0) -> AnswerScorer:
    """Return the scorer of `reward.reward_type`; in a rehearsal, its stand-in.

    Args:
        config: the whole file.
        ask: makes what asks the judges, where there are any.
        rank: the rank of this reward worker.
    """
    reward, data = config.reward, config.data
    if pacing.active is not None:
        return StandInScorer()
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
