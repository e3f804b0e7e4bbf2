"""Verdicts in the words of a judge, and the prompts that ask for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from rlinf_core import ConfigError
from rlinf_core.registry import import_target

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
    verdicts = _CORRECT.findall(text)
    return float(verdicts[-1].lower() == "correct") if verdicts else None


def score(text: str) -> float | None:
    """Return the last `Score: N`, from 0 to 10, as a share of 10."""
    scores = [float(number) for number in _SCORE.findall(text)]
    return scores[-1] / _HIGHEST if scores and scores[-1] <= _HIGHEST else None


def verdict_rule(name: str) -> VerdictRule:
    """Return the rule of `judge.verdict`: `correct`, `score`, or a function of the user's.

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
