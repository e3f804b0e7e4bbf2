"""Rules that say whether an answer is right.

    exact    the same text, but for white space at both ends
    boxed    the content of the last \\boxed{...} is the same text
    number   the last number of the answer is the right one
    math     equal expressions (math-verify): fractions, roots, sets, LaTeX

The answer text is that of the model without the tokens that end it.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, Final, NamedTuple

from rlinf_core import ConfigError

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*[-+]?\d+)?")
_LONGEST_NUMBER = 200


class Verdict(NamedTuple):
    """The score of an answer.

    Attributes:
        right: 0 to 1.
        reason: what it was judged by, for people.
        parts: further figures by name, for metrics.
    """

    right: float
    reason: str
    parts: Mapping[str, float] = {}


Rule = Callable[[str, str], Verdict]


def exact(text: str, answer: str) -> Verdict:
    """Compare texts."""
    same = text.strip() == answer.strip()
    return Verdict(float(same), "the same text" if same else f"not `{_short(answer)}`")


def boxed(text: str, answer: str) -> Verdict:
    """Compare the content of the last `\\boxed{}` with the answer, or with what is boxed in it."""
    found = boxed_content(text)
    if found is None:
        return Verdict(0.0, "no \\boxed{}")
    wanted = boxed_content(answer)
    same = _plain(found) == _plain(answer if wanted is None else wanted)
    return Verdict(float(same), f"boxed `{_short(found)}`")


def number(text: str, answer: str) -> Verdict:
    """Compare the last numbers of both texts, exactly."""
    found, wanted = last_number(text), last_number(answer)
    if found is None:
        return Verdict(0.0, "no number")
    if wanted is None:
        return Verdict(0.0, f"the right answer `{_short(answer)}` is no number")
    return Verdict(float(found == wanted), f"number {_short(str(found))}")


def math(text: str, answer: str) -> Verdict:
    """Compare expressions by math-verify; equal texts and numbers are told first, without it.

    May take very long: `rewards.scoring.Scorer` bounds it.
    """
    candidate = boxed_content(text)
    shown = text if candidate is None else candidate
    if _plain(shown) == _plain(answer):
        return Verdict(1.0, "the same text")
    found, wanted = (_whole_number(_plain(each)) for each in (shown, answer))
    if found is not None and wanted is not None:
        return Verdict(float(found == wanted), f"number {_short(str(found))}")
    library = _math_verify()
    gold = _parsed(library, f"${answer}$" if "$" not in answer and "\\boxed" not in answer else answer)
    guess = _parsed(library, text)
    if not gold:
        return Verdict(0.0, f"the right answer `{_short(answer)}` is no expression")
    if not guess:
        return Verdict(0.0, "no expression")
    same = bool(library.verify(gold, guess, timeout_seconds=None))
    # Texts alone: printing an expression may take as long as comparing it.
    read = next((each for each in reversed(guess) if isinstance(each, str)), "")
    return Verdict(float(same), f"expression `{_short(read)}`")


def prepare_math() -> None:
    """Load math-verify with all that it loads when it is first used, which takes seconds.

    Raises:
        ConfigError: it is not installed.
    """
    math("$\\frac{1}{2}$", "0.5")


def _parsed(library: Any, text: str) -> list[Any]:
    # Its own time limits would end in silence what the caller's limit reports.
    return library.parse(text, parsing_timeout=None)


def _math_verify() -> Any:
    try:
        library = importlib.import_module("math_verify")
    except ImportError:
        raise ConfigError("`reward_type: math` needs the package math-verify", help="pip install math-verify") from None
    # It warns once that the time limits are the caller's.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library


RULES: Final[Mapping[str, Rule]] = {"exact": exact, "boxed": boxed, "number": number, "math": math}


def boxed_content(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` whose braces match, or None."""
    at = text.rfind("\\boxed{")
    while at >= 0:
        depth, start = 1, at + len("\\boxed{")
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start:position]
        at = text.rfind("\\boxed{", 0, at)
    return None


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, exactly: `1,234`, `-2.50`, `3/4`, `1e-3`; None when there is none."""
    for match in reversed(list(_NUMBER.finditer(text))):
        written = match.group().replace(",", "").replace(" ", "")
        if len(written) > _LONGEST_NUMBER:
            continue
        value = _fraction(written)
        if value is not None:
            return value
    return None


def _whole_number(text: str) -> Fraction | None:
    """Return the number that a text is, and nothing else; None when it is more or something else."""
    if len(text) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        return None
    return _fraction(text.replace(",", ""))


def _fraction(written: str) -> Fraction | None:
    above, _, below = written.partition("/")
    try:
        exact_above = Decimal(above)
        if abs(exact_above.adjusted()) > _LONGEST_NUMBER:
            return None
        value = Fraction(exact_above)
        return value / int(below) if below else value
    except (InvalidOperation, ValueError, ZeroDivisionError):
        return None


def _plain(text: str) -> str:
    return re.sub(r"\s+", "", text).strip("$")


def _short(text: str, longest: int = 40) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 3] + "..."
