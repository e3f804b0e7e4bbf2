r"""Answers parsed by structure, and their equality.

A text is a number, a choice, words, a range, a list, a set, or anything else, which is left to math-verify. Sets and
lists without brackets compare as multisets; lists in parentheses or brackets are ordered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal, TypeAlias

from recipes.language.rewards.matching.cleaning import TEXT_COMMAND, cleaned, closing_brace, unwrapped, without_blanks
from recipes.language.rewards.matching.numbers import Number, number_in_clean, numeral_in_clean, same_number

Begin: TypeAlias = Literal["", "(", "[", r"\{"]

# The maximum length of lists that are compared member by member.
_MOST: Final = 24
_MOST_PLACES: Final = 60
_CLOSING: Final[dict[Begin, str]] = {"(": ")", "[": "]", r"\{": r"\}"}
_CONJUNCTION: Final = re.compile(
    r"\s*,?\s*(?:\\(?:text|mathrm|textrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<=[\s,])(?:and|or)(?=[\s$])|;)\s*"
)
_CHOICE: Final = re.compile(
    r"(?:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)(?:\s+is)?:?\s*)?(?:\(\s*([A-Ja-j])\s*\)[.:]?|"
    r"([A-J])(?:[.):,](?=\s|$)|\s*$)|\[([A-J])\])(.*)",
    re.DOTALL,
)
_CHOSEN: Final = re.compile(
    r"(?<![A-Za-z0-9])\(([A-J])\)|\*\*\(?([A-J])[).]*\*\*|\b(?:option|choice|is|choose|pick|select)\s+([A-J])(?=[.,;:!]|\s*$)"
)
_VARIABLE: Final = re.compile(
    r"((?:\\(?:vec|mathbf|bar|hat|text|mathrm)\s*\{[^{}]*\}|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|omega|phi|rho|"
    r"sigma|tau|angle\s*[A-Z]+)(?![A-Za-z])|[A-Za-z]{1,2}'?)"
    r"(?:_(?:\{[^{}]*\}|[A-Za-z0-9]))?(?:\([A-Za-z0-9, ]*\))?)\s*(=|\\in(?![A-Za-z])\s*(?=\\?[{(\[]))\s*"
)
_RANGE: Final = re.compile(
    r"(?:from\s+|between\s+)?(.+?)\s*(?:[\u2013\u2014]|\bto\b|\band\b|\\text\s*\{\s*to\s*\}|\\sim)\s*(.+)"
)
_HYPHENS: Final = re.compile(r"([^-]+?)\s*-{1,3}\s*([^-]+)")
# `1,200,30` is a list of three, but `1,000,2` has two members, as no member begins with 0.
_THOUSANDS: Final = re.compile(
    r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9]{1,2}(?![0-9]))|[1-9][0-9]{0,2}(?:,0[0-9]{2})+(?![0-9])"
)
_DIGITS_ALONE: Final = re.compile(r"[-+]?[0-9.,\s]+")
_SHORT_UNIT: Final = re.compile(r"(.*[0-9}])\s*([A-Za-z]{1,2}(?:\s*\^\s*\{?[0-9]\}?)?)")
# A relation without its left side, or words with that meaning.
_BOUND: Final = re.compile(
    r"\s*(?:[<>]|\\(?:[lg]e|[lg]t|ne|not)(?![A-Za-z]))|.*\\text\w*\s*\{\s*(?:or (?:less|fewer|more|greater|above|below)"
    r"|at (?:most|least)|(?:less|more|greater|fewer) than|under|over|not)\s*\}.*"
)
_TRUTHS: Final = frozenset(("yes", "no", "true", "false", "none", "even", "odd", "both", "neither", "undefined"))
_FUNCTIONS: Final = frozenset(("sqrt", "alpha", "theta", "lambda"))
_SENTENCE: Final = re.compile(r"[A-Za-z][A-Za-z'\-]*(?:[ ,]+[A-Za-z][A-Za-z'\-]*)*")
# The minimum letters of a word without `\text`; shorter ones are products of variables.
_LONG_WORD: Final = 5

# Returns whether two texts, ground truth first, are equal expressions.
Compare: TypeAlias = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class Choice:
    """The letter of a multiple-choice answer, and the text after it."""

    letter: str
    rest: str = ""


@dataclass(frozen=True, slots=True)
class PlainWords:
    """A text in words, in lower case."""

    text: str


@dataclass(frozen=True, slots=True)
class Range:
    """A range of numbers."""

    low: Number
    high: Number


@dataclass(frozen=True, slots=True)
class Listing:
    """Several answers, with their opening and closing brackets as written, or without brackets."""

    begin: Begin
    end: str
    items: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class Other:
    """A LaTeX expression outside of this grammar."""

    text: str


Reading: TypeAlias = Number | Choice | PlainWords | Range | Listing | Other


def read(text: str) -> Reading:
    """Return the reading of a whole text."""
    plain, in_words = unwrapped(cleaned(text))
    return _read(plain, in_words)


def _read(plain: str, in_words: bool) -> Reading:
    number = number_in_clean(plain)
    if number is not None:
        return number
    listing = _listing(plain)
    if listing is not None:
        return listing
    span = _range(plain)
    if span is not None:
        return span
    words = _words(plain, in_words)
    return Other(plain) if words is None else words


def equal(gold: Reading, guess: Reading, compare: Compare) -> bool:
    """Return whether a guess equals the ground truth.

    Args:
        gold: the ground truth.
        guess: the answer to judge.
        compare: compares expressions outside of this grammar.
    """
    if _is_bound(gold) != _is_bound(guess):
        return False
    gold, guess = _measured(gold, guess), _measured(guess, gold)
    if isinstance(gold, Number) and isinstance(guess, Number):
        return same_number(gold, guess)
    if isinstance(gold, Choice | PlainWords) or isinstance(guess, Choice | PlainWords):
        verdict = _same_words(gold, guess)
        if verdict is not None:
            return verdict
    if isinstance(gold, Range) or isinstance(guess, Range):
        return _same_range(gold, guess)
    if isinstance(gold, Listing) or isinstance(guess, Listing):
        verdict = _same_listing(gold, guess, compare)
        if verdict is not None:
            return verdict
    return _same_expression(gold, guess, compare)


def _is_bound(reading: Reading) -> bool:
    """Return whether a text is only a bound, such as `> 5` or `5 \\text{ or less}`."""
    return isinstance(reading, Other) and _BOUND.match(reading.text) is not None


def _measured(reading: Reading, other: Reading) -> Reading:
    """Return `5 m` as five meters if the other side is a measure, as `m` is then no variable."""
    if isinstance(reading, Other) and isinstance(other, Number) and other.unit:
        match = _SHORT_UNIT.fullmatch(reading.text)
        if match is not None:
            return number_in_clean(f"{match.group(1)} \\text{{{match.group(2)}}}") or reading
    return reading


def as_choice(gold: str) -> Choice | None:
    """Return a reference answer as a choice, a single letter from A to J; None if it is not one."""
    match = _CHOICE.fullmatch(unwrapped(cleaned(gold))[0])
    if match is None or match.group(4).strip(" .)"):
        return None
    return Choice(_letter(match))


def chosen(guess: str) -> Choice | None:
    """Return the choice of an answer, which may include the choice's text; None if there is no choice."""
    plain, _ = unwrapped(cleaned(guess))
    # The letter may be in `\\text{}` or `\\textbf{}`, followed by the choice's text.
    if command := TEXT_COMMAND.match(plain):
        end = closing_brace(plain, command.end() - 1)
        if end is not None:
            plain = f"{plain[command.end() : end]} {plain[end + 1 :]}".strip()
    if len(plain) == 1 and plain.isalpha():
        return Choice(plain.upper())
    match = _CHOICE.fullmatch(plain)
    return None if match is None else Choice(_letter(match), match.group(4).strip())


def chosen_in_prose(text: str) -> Choice | None:
    """Return the last choice named in a text, as in `I choose (A)` or `**B**`; None if there is none."""
    matches = list(_CHOSEN.finditer(text))
    return Choice(next(letter for letter in matches[-1].groups() if letter)) if matches else None


def _letter(match: re.Match[str]) -> str:
    return next(letter for letter in match.groups()[:3] if letter).upper()


def text_of(reading: Reading) -> str:
    """Return a reading as LaTeX."""
    match reading:
        case Number():
            return _written(reading.value)
        case Choice():
            return reading.letter
        case PlainWords() | Other():
            return reading.text
        case Range():
            return f"[{text_of(reading.low)}, {text_of(reading.high)}]"
        case Listing():
            return f"{reading.begin}{', '.join(map(text_of, reading.items))}{reading.end}"


def _written(value: Fraction) -> str:
    """Return a number as LaTeX, as a finite decimal if possible, since math-verify compares decimals to six places."""
    if value.denominator == 1:
        return str(value.numerator)
    places = next((places for places in range(1, _MOST_PLACES) if 10**places % value.denominator == 0), None)
    if places is None:
        return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def _listing(plain: str) -> Listing | None:
    """Split a text into several answers; return None for a single one."""
    begin: Begin = ""
    end, inside = "", plain
    for mark, close in _CLOSING.items():
        for last in (close, "]" if mark == "(" else ")") if mark != r"\{" else (close,):
            if plain.startswith(mark) and plain.endswith(last) and _closes_at_end(plain, len(mark)):
                begin, end, inside = mark, last, plain[len(mark) : len(plain) - len(last)]
    if not begin:
        inside = _CONJUNCTION.sub(", ", inside)
        variable = _VARIABLE.match(inside)
        if variable and variable.group(2) != "=":
            inner = _listing(inside[variable.end() :])
            if inner is not None:
                return inner
    items = _split(inside)
    if not begin and len(items) == 1 and items[0].count(r"\pm") == 1 and not re.search(r"\\mp", items[0]):
        items = [items[0].replace(r"\pm", sign, 1).lstrip("+ ") for sign in ("+", "-")]
    elif any(re.search(r"\\[pm]p?m(?![A-Za-z])|\\dots|\\ldots|\.\.\.", item) for item in items):
        return None
    if any(not item.strip() for item in items) or (len(items) == 1 and begin != r"\{"):
        return None
    if begin == r"\{" and any(re.search(r"\\mid|\||:", item) for item in items):
        return None
    if begin in ("(", "[") and any("=" in item for item in items):
        return None
    # `x = 3, 5` gives two values of x, and names it before the first.
    bare = not begin and sum("=" in item for item in items) == 1
    if bare and (variable := _VARIABLE.match(items[0])):
        items[0] = items[0][variable.end() :]
    return Listing(begin, end, tuple(_read(*unwrapped(item.strip())) for item in items))


def _closes_at_end(plain: str, start: int) -> bool:
    """Return whether a text is enclosed by its first and last bracket, as in `(1,(2,3))`."""
    depth = 1
    for position in range(start, len(plain)):
        character = plain[position]
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return position == len(plain) - 1
    return False


def _split(text: str) -> list[str]:
    """Split a text at commas outside of brackets that do not separate thousands."""
    parts, depth, start = [], 0, 0
    position = 0
    while position < len(text):
        character = text[position]
        fresh = position == 0 or not (text[position - 1].isdigit() or text[position - 1] in ".,")
        fresh = fresh or (position > 0 and text[position - 1] == "," and start == position)
        if character.isdigit() and fresh and (match := _THOUSANDS.match(text, position)):
            position = match.end()
            continue
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
        position += 1
    return [*parts, text[start:]]


def _range(plain: str) -> Range | None:
    """Return a text as a range of numbers; a hyphen does not make a range, as it may be a minus."""
    match = _RANGE.fullmatch(plain)
    return None if match is None else _range_of(match)


def _range_of(match: re.Match[str]) -> Range | None:
    ends = [number_in_clean(unwrapped(part)[0]) for part in match.groups()]
    return None if ends[0] is None or ends[1] is None else Range(ends[0], ends[1])


def _words(plain: str, in_words: bool) -> PlainWords | None:
    text = " ".join(re.sub(r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", plain).split())
    text = text.replace(r"\ ", " ").strip(" .,!")
    if not _SENTENCE.fullmatch(text):
        return None
    words = text.lower().split()
    in_words = in_words or TEXT_COMMAND.search(plain) is not None
    is_prose = (in_words and max(map(len, words)) > 1) or any(
        word in _TRUTHS or (len(word) >= _LONG_WORD and word not in _FUNCTIONS) for word in words
    )
    return PlainWords(" ".join(words)) if is_prose else None


def _same_words(gold: Reading, guess: Reading) -> bool | None:
    """Return whether words are equal; None if the expressions decide."""
    if isinstance(guess, Listing) and isinstance(gold, PlainWords) and gold.text in _TRUTHS:
        # "Yes, it is" says yes.
        rest = guess.items[1:]
        return guess.items[0] == gold and not any(
            isinstance(part, PlainWords) and part.text in _TRUTHS for part in rest
        )
    texts = [part.text.lower() for part in (gold, guess) if isinstance(part, PlainWords | Other)]
    if len(texts) < 2:
        return False if isinstance(gold, PlainWords) else None
    if isinstance(gold, PlainWords) and isinstance(guess, PlainWords):
        return texts[0] == texts[1]
    # Compare as text: as products of variables, "live" would equal "evil".
    return texts[0] == texts[1] if all(re.fullmatch(r"[a-z ]+", text) for text in texts) else None


def _same_range(gold: Reading, guess: Reading) -> bool:
    if isinstance(gold, Range) and isinstance(guess, Other) and (match := _HYPHENS.fullmatch(guess.text)):
        guess = _range_of(match) or guess
    if isinstance(guess, Range) and isinstance(gold, Other) and (match := _HYPHENS.fullmatch(gold.text)):
        gold = _range_of(match) or gold
    pairs: list[tuple[Number, Number]] = []
    for reading in (gold, guess):
        if isinstance(reading, Range):
            pairs.append((reading.low, reading.high))
        elif isinstance(reading, Listing) and reading.begin == "[" and reading.end == "]" and len(reading.items) == 2:
            low, high = reading.items
            if isinstance(low, Number) and isinstance(high, Number):
                pairs.append((low, high))
    return len(pairs) == 2 and all(same_number(*ends) for ends in zip(*pairs, strict=True))


def _same_listing(gold: Reading, guess: Reading, compare: Compare) -> bool | None:
    """Return whether several answers are equal; None if the expressions decide, as for an inequality."""
    if not (isinstance(gold, Listing) and isinstance(guess, Listing)):
        other = guess if isinstance(gold, Listing) else gold
        listing = gold if isinstance(gold, Listing) else guess
        # A set of one equals its member; several answers never equal one number or word.
        if isinstance(listing, Listing) and len(listing.items) == 1:
            pair = (listing.items[0], other) if listing is gold else (other, listing.items[0])
            return equal(*pair, compare)
        return False if isinstance(other, Number | Choice | PlainWords) else None
    if max(len(gold.items), len(guess.items)) > _MOST:
        return None
    if len(gold.items) != len(guess.items):
        return False
    marks = {(gold.begin, gold.end), (guess.begin, guess.end)}
    if marks <= {("", ""), (r"\{", r"\}")}:
        return _same_members(gold.items, guess.items, compare)
    if len(marks) > 1 and ("", "") not in marks:
        return False
    return all(equal(*pair, compare) for pair in zip(gold.items, guess.items, strict=True))


def _same_members(gold: Sequence[Reading], guess: Sequence[Reading], compare: Compare) -> bool:
    left = list(guess)
    for wanted in gold:
        # Try equal readings first, as they need no expensive comparison.
        order = sorted(range(len(left)), key=lambda index: left[index] != wanted)
        match = next((index for index in order if equal(wanted, left[index], compare)), None)
        if match is None:
            return False
        left.pop(match)
    return True


def _same_expression(gold: Reading, guess: Reading, compare: Compare) -> bool:
    """Return whether expressions are equal; if only one side has `x =`, its right-hand side is compared."""
    texts = [text_of(gold), text_of(guess)]
    # math-verify cannot parse a base.
    numerals = [numeral_in_clean(text) for text in texts]
    if numerals[0] and numerals[1]:
        return numerals[0] == numerals[1]
    variables = [_VARIABLE.match(text) for text in texts]
    if variables[0] and variables[1]:
        if without_blanks(variables[0].group(1)) != without_blanks(variables[1].group(1)):
            return compare(*texts)
        rests = [text[match.end() :] for text, match in zip(texts, variables, strict=True) if match]
        return equal(read(rests[0]), read(rests[1]), compare) or compare(*texts)
    for index, match in enumerate(variables):
        if match and "=" not in texts[1 - index]:
            texts[index] = texts[index].rpartition("=")[2] if match.group(2) == "=" else texts[index][match.end() :]
            return equal(read(texts[0]), read(texts[1]), compare)
        if match is None and texts[index].count("=") == 1 and "=" not in texts[1 - index]:
            left, _, right = texts[index].partition("=")
            # `a + 3z = 0` does not define a single quantity.
            if re.search("[A-Za-z]", left) and re.search(r"\S\s*[-+]", left):
                return False
            # In `5 = x` and `3 + 4 = 7`, compare the side that is a number, opposite a variable or a sum of numbers.
            for side, other in ((right, left), (left, right)):
                is_said = _VARIABLE.fullmatch(f"{other.strip()}=") or not re.search("[A-Za-z]", other)
                if is_said and number_in_clean(side.strip()) is not None:
                    texts[index] = side.strip()
                    return equal(read(texts[0]), read(texts[1]), compare)
    # Digits that form no number, such as `1 00 0000`, equal only the same text.
    if any(isinstance(part, Other) and _DIGITS_ALONE.fullmatch(part.text) for part in (gold, guess)):
        return texts[0] == texts[1]
    return without_blanks(texts[0]) == without_blanks(texts[1]) or compare(*texts)
