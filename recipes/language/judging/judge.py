"""A model that judges answers, with its engine."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from recipes.language.answers.sequences import Request, SamplingParams
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.config.frozen_models import judge_job
from recipes.language.config.language_config import LanguageConfig
from recipes.language.data.problems import Problem
from recipes.language.data.prompts import PromptEncoder
from recipes.language.data.thoughts import without_thought
from recipes.language.engines.registry import make_engine
from recipes.language.models.load_model import make_tokenizer, stop_token_ids
from recipes.language.prompts.prompt_messages import JudgeReply, JudgeRequest
from recipes.training.chat_template import TemplateRefusalError
from rlinf_core import ConfigError
from rlinf_core.registry import import_target
from rlinf_core.runners.storage.first_contact import FirstContact
from rlinf_core.suggest import excerpt

# Replies to one answer that are drawn before the right answer is judged instead, to see whether the judge judges.
_TRIES: Final = 2
# A greedy reply without a verdict would be drawn again as it was.
_SECOND_TEMPERATURE: Final = 1.0
_SHOWN: Final = 120


class Judge:
    """A model that judges answers, with its engine, driven in small steps.

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

    @property
    def unfinished(self) -> int:
        """Answers that are being judged."""
        return len(self._open)

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

    def step(self) -> list[tuple[JudgeRequest, JudgeReply]]:
        """Draw a token of each reply, and return the verdicts of those that ended."""
        replies: list[tuple[JudgeRequest, JudgeReply]] = []
        for answer in self.engine.step():
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
            for _, reply in self.step():
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
    if not callable(function):
        raise ConfigError(f"`judge.verdict: {name}` is not a function", help="name a function of the judge's text")

    def checked(text: str) -> float | None:
        value: Any = function(text)
        return None if value is None else float(value)

    return checked
