"""The judge model with its engine, and the scorers of reward workers, including those that ask a judge."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from recipes.language.answers.prompt_messages import Inbox, JudgeReply, JudgeRequest, judge_key, verdict_key
from recipes.language.answers.sequences import Cause, Exit, Request, SamplingParams, Score
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.config.described_models import judge_job
from recipes.language.config.language_config import LanguageConfig
from recipes.language.data.problems import Problem, PromptEncoder
from recipes.language.engines.registry import make_engine
from recipes.language.models.load_model import make_tokenizer, stop_token_ids
from recipes.language.rewards.functions import finite
from recipes.language.rewards.scoring import PROGRAMS, AnswerScorer, Item, Scorer, StandInScorer
from recipes.language.text.chat_template import TemplateRefusalError
from recipes.language.text.text_tokens import without_thought
from rlinf_core import Channel
from rlinf_core.process import pacing
from rlinf_core.registry import import_target
from rlinf_core.runners.storage.first_contact import FirstContact
from rlinf_core.suggest import excerpt

# After this many replies without a verdict, the judge gets the right answer instead, to test whether it works.
_TRIES: Final = 2
# The temperature of a second try: repeating a greedy reply would give the same reply.
_SECOND_TEMPERATURE: Final = 1.0
_SHOWN: Final = 120


class Judge:
    """The judge model with its engine.

    Args:
        config: the whole configuration.
        device: the device of the model.
        contact: the start-up checks to which the engine's check is added.
        owner: the worker that owns the engine, for errors.

    Raises:
        ConfigError: the model or the verdict's function cannot be loaded, or the engine's package is missing.
    """

    def __init__(
        self, config: LanguageConfig, device: torch.device, contact: FirstContact | None = None, owner: str = "judge"
    ) -> None:
        asked, job = config.reward.judging, judge_job(config)
        tokenizer = make_tokenizer(job.actor)
        self._encoder = PromptEncoder(
            tokenizer,
            apply_chat_template=asked.apply_chat_template,
            system_prompt=asked.system_prompt,
            template_arguments=asked.chat_template_kwargs,
        )
        self._template = asked.template or TEMPLATES[asked.verdict]
        self._verdict = verdict_rule(asked.verdict)
        self._params = SamplingParams(temperature=asked.temperature, max_new_tokens=asked.max_new_tokens)
        self._stops = stop_token_ids(tokenizer, config.judge.model_path)
        self.engine = make_engine(job, tokenizer, self._stops, device, contact, owner)
        self._room = min(asked.seq_length, self.engine.longest or asked.seq_length) - asked.max_new_tokens
        # Open requests by their engine id, each with its number of tries and the reason of the last failed try.
        self._open: dict[str, tuple[JudgeRequest, int, str]] = {}

    def submit(self, requests: Iterable[JudgeRequest]) -> list[tuple[JudgeRequest, JudgeReply]]:
        """Start judging answers, and return the replies to those that the judge cannot be asked about."""
        refused: list[tuple[JudgeRequest, JudgeReply]] = []
        for request in requests:
            tokens = self._encoded(request, without_thought(request.text))
            if isinstance(tokens, str):
                # The answer is at fault if the question alone would fit.
                fits = not isinstance(self._encoded(request, ""), str)
                refused.append((request, JudgeReply(request.number, None, tokens, works=fits)))
                continue
            name = f"{request.sender}:{request.number}"
            self._open[name] = request, 1, ""
            self.engine.submit(Request(request_id=name, prompt=tokens, params=self._params))
        return refused

    def _encoded(self, request: JudgeRequest, text: str) -> tuple[int, ...] | str:
        """Return the tokens of the judge's prompt, or the reason why it cannot be asked."""
        asked = filled(self._template, prompt=request.prompt, answer=request.answer, text=text)
        try:
            tokens = self._encoder.encode(Problem(prompt=asked, answer=""))
        except TemplateRefusalError as refusal:
            return f"the judge cannot be asked: {refusal.reason}"
        if not tokens or len(tokens) > self._room:
            return f"the judge cannot be asked: its prompt has more than {self._room} tokens"
        return tuple(tokens)

    def read(self, answers: Iterable[Answer]) -> list[tuple[JudgeRequest, JudgeReply]]:
        """Return the verdicts of finished replies; a reply without a verdict is sampled again."""
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
        """Return the verdict of a reply and its text, or None and the reason."""
        if answer.failed:
            return None, f"the judge's engine failed: {answer.failure}"
        text = self._encoder.text(answer.tokens, self._stops)
        try:
            right = self._verdict(text)
        except Exception as error:  # noqa: BLE001 - a function of the user's
            return None, f"`reward.options.verdict` failed: {type(error).__name__}: {error}"
        shown = excerpt(text[-_SHOWN:], _SHOWN)
        if right is None:
            return None, f"the judge gave no verdict: `{shown}`"
        if not (math.isfinite(right) and 0 <= right <= 1):
            return None, f"the verdict is {right:g}, which is not from 0 to 1"
        return right, f"judge: `{shown}`"

    def results(self, requests: Sequence[JudgeRequest]) -> Iterator[JudgeReply]:
        """Judge answers, and yield verdicts as they arrive."""
        for _, reply in self.submit(requests):
            yield reply
        while self._open:
            for _, reply in self.read(self.engine.step()):
                yield reply


# Maps the text of a judge to a number from 0 to 1; None: no verdict.
VerdictRule = Callable[[str], float | None]

_CORRECT: Final = re.compile(r"verdict\W*\b(correct|incorrect)\b", re.IGNORECASE)
# `Score (0-10): 8` names its scale first; 4/5, 80% and 6-7 are on another scale, or no number.
_SCORE: Final = re.compile(
    r"score(?:\W*0\W*10\b)?\W*?(?<![-\u2212])(\d+(?:\.\d+)?)"
    r"(?![\d.,]*\d|\s*%|[-\u2013]\d|\s*(?:/|out of)\s*(?!10\b)\d)",
    re.IGNORECASE,
)
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
    """Return a template with its placeholders filled in; placeholders within the values stay."""
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
    """Return the rule of `reward.options.verdict`: `correct`, `score`, or a user's function.

    Raises:
        ConfigError: the function cannot be imported or is not callable.
    """
    if ":" not in name:
        return {"correct": correct, "score": score}[name]
    function: Any = import_target(name, "verdict")

    def checked(text: str) -> float | None:
        value: Any = function(text)
        return None if value is None else finite("verdict", value)

    return checked


Ask = Callable[[Sequence[JudgeRequest]], Iterable[JudgeReply]]


class JudgeScorer:
    """A scorer that asks judges, with the interface of `Scorer`.

    Args:
        ask: sends requests, and returns all replies, in any order.
        sender: the rank of this reward worker.
        correct: the reward of a right answer.
        incorrect: the reward of a wrong answer.
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
        # Start at a random number: a restarted worker may still receive verdicts that its predecessor asked for.
        self._asked = secrets.randbelow(1 << 60)

    def start(self) -> None:
        """Do nothing: judges load their models themselves."""

    def score_all(self, items: Sequence[Item]) -> list[Score]:
        """Return the scores of answers; one without a verdict is wrong if the judge otherwise works."""
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
        """Do nothing: judges end by themselves."""


def ask_judges(channel: Channel, rank: int, judges: int, requests: Sequence[JudgeRequest]) -> Iterator[JudgeReply]:
    """Distribute requests of a reward worker over the group `judge`, and yield the replies.

    Args:
        channel: the channel to the judges and back.
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
    """Return the scorer of `reward.reward_type`; in a rehearsal, a stand-in.

    Args:
        config: the whole configuration.
        ask: makes the function that asks the judges, if there are judges.
        rank: the rank of this reward worker.
    """
    reward, data = config.reward, config.data
    if pacing.active is not None:
        return StandInScorer()
    if reward.asks_judge:
        return JudgeScorer(ask(), rank, correct=reward.correct_reward, incorrect=reward.incorrect_reward)
    settings: dict[str, Any] | None = None
    if data.type == "reasoning_gym":
        settings = {"task": data.settings.task, "task_config": data.task_settings}
    elif reward.reward_type == PROGRAMS:
        settings = {"memory": reward.program.program_memory_mib << 20}
    return Scorer(
        reward.reward_type,
        correct=reward.correct_reward,
        incorrect=reward.incorrect_reward,
        timeout=reward.timeout,
        settings=settings,
    )
