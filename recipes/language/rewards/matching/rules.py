"""Rules that judge whether an answer is right.

    exact the same text, except for white space at both ends boxed the content of the last \\boxed{...} is the same
    text, after normalization number the number that is boxed, stated as the answer, or last, is the right one math
    equal numbers, choices, words, lists, and expressions (math-verify)

The text of an answer excludes its ending tokens. No answer matches an empty ground truth.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import product
from typing import Any, Final, NamedTuple

from recipes.language.rewards.matching.cleaning import boxed_content, cleaned, unwrapped, without_blanks
from recipes.language.rewards.matching.final_answer import (
    answer_number,
    answered,
    candidates,
    is_undecided,
    said_answer,
)
from recipes.language.rewards.matching.numbers import Number, same_number, same_value
from recipes.language.rewards.matching.readings import Other, as_choice, chosen, chosen_in_prose, equal, read, text_of
from recipes.language.rewards.matching.regions import same_region
from rlinf_core import ConfigError
from rlinf_core.suggest import excerpt


class Verdict(NamedTuple):
    """The score of an answer.

    Attributes:
        right: 0 to 1; from a custom function, the reward.
        reason: the explanation, for people.
        parts: further numbers by name, for metrics.
        correct: whether the answer is right, if a function says so apart from its reward; None: by the reward.
        exit: the `Exit` of an answer that is a program; "" else.
    """

    right: float
    reason: str
    parts: Mapping[str, float] = {}
    correct: bool | None = None
    exit: str = ""


Rule = Callable[[str, str], Verdict]


def exact(text: str, answer: str) -> Verdict:
    """Compare texts."""
    if not answer.strip():
        return _EMPTY
    same = text.strip() == answer.strip()
    return Verdict(float(same), "the same text" if same else f"not `{excerpt(answer, 40)}`")


def boxed(text: str, answer: str) -> Verdict:
    """Compare the content of the last `\\boxed{}` with the reference answer, or with its boxed content."""
    content, wanted = boxed_content(answered(text)), boxed_content(answer)
    if not (answer if wanted is None else wanted).strip():
        return _EMPTY
    if content is None:
        return Verdict(0.0, "no \\boxed{}")
    same = _plain(content) == _plain(answer if wanted is None else wanted)
    return Verdict(float(same), f"boxed `{excerpt(content, 40)}`")


def number(text: str, answer: str) -> Verdict:
    """Compare the numbers that both texts give as their answers, exactly."""
    wanted = answer_number(answer)
    if wanted is None:
        return Verdict(0.0, f"the correct answer `{excerpt(answer, 40)}` is not a number")
    guess = answer_number(answered(text))
    if guess is None:
        return Verdict(0.0, "no number")
    return Verdict(float(guess.value == wanted.value), f"number {excerpt(str(guess.value), 40)}")


def math(text: str, answer: str) -> Verdict:
    """Compare the answers of both texts: by structure (`readings`), and expressions by math-verify.

    May take very long: `rewards.scoring.Scorer` bounds it.
    """
    wanted = boxed_content(answer)
    wanted = answer if wanted is None else wanted
    gold = read(wanted)
    if not text_of(gold).strip():
        return _EMPTY
    if _plain(wanted).lower() == "nan":
        return _UNDEFINED
    text = answered(text)
    content = boxed_content(text)
    choice = as_choice(wanted)
    shown = ""
    for guess in candidates(text) if content is None else (content,):
        shown = shown or guess
        if _plain(guess) == _plain(wanted):
            return Verdict(1.0, f"{type(gold).__name__.lower()} `{excerpt(guess, 40)}`")
        choices = None if choice is None else chosen(guess)
        if choice is not None and choices is not None:
            return Verdict(float(choice.letter == choices.letter), f"choice {choices.letter}")
        reading = read(guess)
        if not text_of(reading).strip():
            continue
        same = same_region(_spelled(wanted), _spelled(guess))
        if same:
            return Verdict(1.0, f"region `{excerpt(guess, 40)}`")
        if same is False:
            continue
        # math-verify would take letters of prose for variables.
        if content is None and isinstance(reading, Other) and (len(guess) > _LONGEST or _PROSE.search(guess)):
            continue
        if equal(gold, reading, _same_expressions):
            return Verdict(1.0, f"{type(reading).__name__.lower()} `{excerpt(guess, 40)}`")
    if content is None and not _says_nothing_more(text, shown):
        if choice is not None and (named := chosen_in_prose(text)) is not None:
            return Verdict(float(choice.letter == named.letter), f"choice {named.letter}")
        number_said = answer_number(text)
        if isinstance(gold, Number) and number_said is not None:
            return Verdict(float(same_number(gold, number_said)), f"number {excerpt(str(number_said.value), 40)}")
        # math-verify would accept a part of a text that is no number, such as a time, a date, or two numbers.
        parted = is_undecided(text) or _PARTED.search(said_answer(text) or shown)
        if isinstance(gold, Number) and parted:
            return Verdict(0.0, f"read `{excerpt(shown, 40)}`")
        # Let math-verify find the expression in prose.
        return _in_prose(text, text_of(gold))
    return Verdict(0.0, f"read `{excerpt(shown, 40)}`" if shown.strip() else "no answer")


# The maximum length of an unboxed answer that may be an expression as a whole, in characters.
_LONGEST: Final = 300
# The digits to compute of a difference, and the maximum working precision for that.
_PLACES: Final = 5
_MOST_PLACES: Final = 1000
_CHAIN: Final = re.compile(r"[^<>=]+(?:<|\\le)\s*[A-Za-z]\s*(?:<|\\le)[^<>=]+")
_PROSE: Final = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}(?![A-Za-z(])")
_EMPTY: Final = Verdict(0.0, "the correct answer is empty")
# A value that is missing in a table equals nothing, not even itself.
_UNDEFINED: Final = Verdict(0.0, "the correct answer `nan` is no value")
_PARTED: Final = re.compile(r"[0-9][$*` ]*[:\u2013\u2014-][$*` ]*[0-9]")


def _says_nothing_more(text: str, shown: str) -> bool:
    return text.strip() == shown.strip() and not re.search(r"[A-Za-z]{2}|\$|\n", text)


def _same_expressions(gold: str, guess: str) -> bool:
    """Return whether two expressions are equal by math-verify."""
    library = _math_verify()
    wanted, parsed = (_parsed(library, _formula(text)) for text in (gold, guess))
    if not wanted or not parsed:
        return False
    # `(1,2)` may be a point, but compared with `1 < x < 2` it is an interval.
    ranges = bool(re.search(r"\\infty|[\[\]]|\\cup", gold) or _CHAIN.fullmatch(guess))
    return _verified(library, wanted, parsed, allow_set_relation_comp=ranges)


def _verified(library: Any, gold: list[Any], guess: list[Any], **options: bool) -> bool:
    """Return whether two values are equal by math-verify and not certain to differ.

    math-verify compares decimals to six places, and ignores differences that are tiny relative to 1.
    """
    return any(
        library.verify(one, other, timeout_seconds=None, **options) and not _differ(one, other)
        for one, other in product(gold, guess)
    )


def _differ(gold: Any, guess: Any) -> bool:
    """Return whether two values are certain to differ, by exact arithmetic."""
    sympy = importlib.import_module("sympy")
    if gold == guess:
        return False
    if isinstance(gold, sympy.Eq) and isinstance(guess, sympy.Eq):
        return gold.lhs == guess.lhs and _differ(gold.rhs, guess.rhs)
    if isinstance(gold, sympy.MatrixBase) and isinstance(guess, sympy.MatrixBase):
        return any(_differ(*pair) for pair in zip(gold.flat(), guess.flat(), strict=True))
    if not all(isinstance(value, sympy.Expr) and not value.free_symbols for value in (gold, guess)):
        return False
    # Take decimals exactly as written.
    exact = [
        value.xreplace({part: sympy.Rational(repr(float(part))) for part in value.atoms(sympy.Float)})
        for value in (gold, guess)
    ]
    if all(value.is_Rational for value in exact):
        return not same_value(*(Fraction(int(value.p), int(value.q)) for value in exact))
    try:
        difference = (exact[0] - exact[1]).evalf(_PLACES, maxn=_MOST_PLACES, strict=True)
    except (ArithmeticError, TypeError, ValueError, NotImplementedError):
        # The digits are inconclusive: trust math-verify.
        return False
    return bool(difference.is_number and difference.is_finite and difference != 0)


def is_expression(text: str) -> bool:
    """Return whether math-verify can parse a text as an expression."""
    plain = unwrapped(cleaned(text))[0]
    return any(not isinstance(part, str) for part in _parsed(_math_verify(), _formula(plain)))


def _in_prose(text: str, gold: str) -> Verdict:
    library = _math_verify()
    said = said_answer(text)
    wanted = _parsed(library, _formula(gold))
    parsed = ([] if said is None else _parsed(library, said)) or _parsed(library, text)
    if not wanted:
        return Verdict(0.0, f"the correct answer `{excerpt(gold, 40)}` is not an expression")
    if not parsed:
        return Verdict(0.0, "no expression")
    same = _verified(library, wanted, parsed)
    # Show texts only: printing an expression may take as long as comparing it.
    shown = next((part for part in reversed(parsed) if isinstance(part, str)), "")
    return Verdict(float(same), f"expression `{excerpt(shown, 40)}`")


def _formula(text: str) -> str:
    """Return a cleaned text as a formula: a bare `%` would end it, and a bare `$` start another."""
    return "$" + re.sub(r"(?<!\\)([%$])", r"\\\1", text).replace("°", r"^{\circ}") + "$"


def prepare_math() -> None:
    """Load math-verify and its dependencies, which takes seconds.

    Raises:
        ConfigError: math-verify is not installed.
    """
    _same_expressions(r"\frac{1}{2}", r"x + \sqrt{2}")


def _parsed(library: Any, text: str) -> list[Any]:
    # Disable math-verify's time limits, which would silently pre-empt the caller's.
    return library.parse(text, parsing_timeout=None)


def _math_verify() -> Any:
    try:
        library = importlib.import_module("math_verify")
    except ImportError:
        raise ConfigError("`reward_type: math` needs the package math-verify", help="pip install math-verify") from None
    # Suppress its warning about disabled time limits.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library


RULES: Final[Mapping[str, Rule]] = {"exact": exact, "boxed": boxed, "number": number, "math": math}


def _plain(text: str) -> str:
    return without_blanks(_spelled(text))


def _spelled(text: str) -> str:
    return unwrapped(cleaned(text))[0]
