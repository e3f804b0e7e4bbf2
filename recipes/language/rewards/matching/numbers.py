r"""The grammar of numbers and units; a text is a number only as a whole, never by a part.

    number = [sign] [currency] magnitude [unit], also in parentheses magnitude = decimal | decimal e integer | decimal
    \times 10^integer | 10^integer | \frac{decimal}{decimal} | decimal/decimal | integer \frac{..}{..} | integer
    integer/integer | decimal \overline{digits} decimal = integer [. digits] | . digits integer = digits | 1 to 3
    digits, and groups of exactly three after commas or blanks unit = % | ° | currency | million | words that are not
    names of variables, with exponents

Texts are `cleaned` first (`cleaning`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Final, NamedTuple

from recipes.language.rewards.matching.cleaning import TEXT_COMMAND, closing_brace

# Measures that must not be confused, by name, with their spellings (without a final s).
_MEASURES: Final = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "dm": "dm decimeter decimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inche",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "mg": "mg milligram",
    "g": "g gram",
    "kg": "kg kilogram",
    "lb": "lb pound",
    "oz": "oz ounce",
    "ml": "ml mL milliliter millilitre",
    "l": "l L liter litre",
    "gal": "gal gallon",
    "ms": "ms millisecond",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "day": "day",
    "week": "week wk",
    "month": "month",
    "year": "year yr",
    "$": "dollar USD buck",
    "cent": "cent",
    "°": "° degree deg",
    "rad": "rad radian",
    "mph": "mph",
    "kph": "kph kmh",
}
_KNOWN: Final = {spelling: name for name, spellings in _MEASURES.items() for spelling in spellings.split()}
_FACTORS: Final = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
# Words after a number that change its value, or begin another part of the sentence.
_VALUE_WORDS: Final = """
    and or not the but with plus minus times over mod choose divided squared cubed factorial root dozen half halves
    third thirds quarter quarters fourth fifth sixth tenth tenths hundredth hundredths percentile to power base
    sin cos tan cot sec csc log exp lim max gcd lcm det sqrt arcsin arccos arctan sum prod inf
"""
_NO_UNITS: Final = frozenset(_VALUE_WORDS.split()) - {"sec"}
# Short units that are not names of variables.
_SHORT: Final = frozenset(("mm", "cm", "dm", "km", "ft", "yd", "kg", "mg", "lb", "oz", "ml", "mL", "in", "hr"))
_SYMBOLS: Final = "NJWVAKCFHT"
_LONG_WORD: Final = 3
_EXPONENT: Final = r"(?:\s*\^\s*(?:\{\s*-?[0-9]+\s*\}|-?[0-9]+))?"
_WORD: Final = re.compile(rf"\s*((?:square|cubic|sq\.?|cu\.?)\s+)?\\?([A-Za-z]+|°[CF]?|[%$€£¥¢])\.?({_EXPONENT})")
_BETWEEN: Final = re.compile(r"\s*(?:/|\\cdot|\*|-(?=[A-Za-z])|\bper\b)\s*|\s*")


class MeasureUnit(NamedTuple):
    """The unit of a number: its factor, and the name of its measure if known."""

    factor: int
    name: str


def parse_unit(text: str) -> MeasureUnit | None:
    """Return the unit that the whole text is, None if it is not one; "" gives factor 1 without a name."""
    text = text.rstrip()
    if not text:
        return MeasureUnit(1, "")
    # Unwrap `9 (apples)`.
    if match := re.fullmatch(r"\s*\(([A-Za-z ]+)\)", text):
        text = f" {match.group(1).strip()}"
    plain, marked = _unwrapped_words(text)
    factor, names = 1, list[str]()
    blank, divided = plain[:1].isspace(), False
    at = 0
    while at < len(plain):
        match = _WORD.match(plain, at)
        if match is None:
            return None
        kind, word, exponent = match.groups()
        if at == 0 and word.lower() in _FACTORS:
            factor = _FACTORS[word.lower()]
        elif _is_unit(word, blank=blank, marked=marked or divided or (blank and plain[match.end() :][:1] == "/")):
            names.append(_name(word, (kind or "").strip(), exponent))
        else:
            return None
        gap = _BETWEEN.match(plain, match.end())
        at = match.end() if gap is None else gap.end()
        between = plain[match.end() : at]
        blank, divided = between != "", "/" in between or "per" in between
    # Compare a speed, or "red apples", by its number alone.
    return MeasureUnit(factor, names[0] if len(names) == 1 else "")


def _is_unit(word: str, *, blank: bool, marked: bool) -> bool:
    """Return whether a word is a unit.

    Args:
        word: the word.
        blank: whether a blank separates it from the text before it.
        marked: whether it is in `\\text`, or next to a division, and so not a variable.
    """
    if not word.isalpha():
        return True
    if word.lower() in _NO_UNITS:
        return False
    if marked:
        return len(word) > 1 or word in _KNOWN or word in _SYMBOLS
    known = _KNOWN.get(word) or _KNOWN.get(word.lower().removesuffix("s"))
    if known and (word in _SHORT or len(word) >= _LONG_WORD):
        return True
    return blank and len(word) >= _LONG_WORD


def _name(word: str, kind: str, exponent: str) -> str:
    name = _KNOWN.get(word) or _KNOWN.get(word.lower().removesuffix("s")) or ""
    if not name:
        return ""
    power = re.sub(r"[^0-9-]", "", exponent) or {"s": "2", "c": "3"}.get(kind[:1], "1")
    return name if power == "1" else f"{name}^{power}"


def _unwrapped_words(text: str) -> tuple[str, bool]:
    r"""Return a text with `\text{...}` unwrapped, and whether it had any."""
    pieces = list(_pieces(text))
    return "".join(pieces), TEXT_COMMAND.search(text) is not None


def _pieces(text: str) -> Iterator[str]:
    at = 0
    while (match := TEXT_COMMAND.search(text, at)) is not None:
        end = closing_brace(text, match.end() - 1)
        if end is None:
            break
        yield text[at : match.start()] + " "
        yield text[match.end() : end]
        at = end + 1
    yield text[at:]


# The maximum length of a number and its largest power of ten: longer ones are no answers and would take time.
_LONGEST: Final = 200

_DIGITS: Final = "[0-9]+"
_INTEGER: Final = rf"(?:[1-9][0-9]{{0,2}}(?:(?:,[0-9]{{3}})+|(?: [0-9]{{3}})+)(?![0-9])|{_DIGITS})"
_DECIMAL: Final = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_TIMES: Final = r"\s*(?:\\times|\\cdot|\*|[xX])\s*"
_POWER: Final = r"10\s*(?:\^|\*\*)\s*(?:\{\s*([-+]?[0-9]+)\s*\}|([-+]?[0-9]+))"
_SIGN: Final = r"([-+]?)\s*"
_CURRENCY: Final = r"(?:US)?(?:\\?\$|\\(?:pounds|euro)(?![A-Za-z])|[€£¥₹])"

_FRAME: Final = re.compile(rf"{_SIGN}({_CURRENCY})?\s*{_SIGN}")
_MAGNITUDES: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("repeating", re.compile(rf"({_INTEGER}?\.[0-9]*)\\(?:overline|bar|dot)\{{([0-9]+)\}}")),
    ("mixed", re.compile(rf"({_DIGITS})\s*\\frac\{{({_DIGITS})\}}\{{({_DIGITS})\}}")),
    ("mixed", re.compile(rf"({_DIGITS})\s+({_DIGITS})\s*/\s*({_DIGITS})(?![0-9/])")),
    ("fraction", re.compile(rf"\\frac\{{\s*([-+]?\s*{_DECIMAL})\s*\}}\{{\s*([-+]?\s*{_DECIMAL})\s*\}}")),
    ("fraction", re.compile(rf"({_DECIMAL})\s*/\s*([-+]?\s*{_DECIMAL})(?!\s*/)")),
    ("power", re.compile(rf"({_DECIMAL}){_TIMES}{_POWER}")),
    ("power", re.compile(rf"(){_POWER}")),
    ("power", re.compile(rf"({_DECIMAL})[eE]([-+]?[0-9]+)()")),
    ("decimal", re.compile(rf"({_DECIMAL})")),
)


class Number(NamedTuple):
    """A number with its unit.

    Attributes:
        value: the exact value; that of `50%` is 50, as in PRM800K's grader.
        unit: the known measure, by one name for all spellings; "" for any other unit, or none.
    """

    value: Fraction
    unit: str = ""


def number_in_clean(text: str) -> Number | None:
    """Return the number that the whole of a cleaned text is; None if it is not a number, or too long."""
    if len(text) > _LONGEST:
        return None
    text = _without_parentheses(text)
    frame = _FRAME.match(text)
    if frame is None or (frame.group(1) and frame.group(3)):
        return None
    negative = "-" in (frame.group(1), frame.group(3))
    rest = text[frame.end() :]
    for kind, pattern in _MAGNITUDES:
        match = pattern.match(rest)
        if match is None:
            continue
        unit = parse_unit(rest[match.end() :])
        value = _value(kind, match.groups())
        if unit is None or value is None:
            continue
        if frame.group(2) and unit.name:
            return None
        name = "$" if frame.group(2) and "$" in frame.group(2) else unit.name
        return Number((-value if negative else value) * unit.factor, name)
    return None


def same_number(one: Number, other: Number) -> bool:
    """Return whether numbers are equal and their known measures do not differ."""
    return same_value(one.value, other.value) and not (one.unit and other.unit and one.unit != other.unit)


def same_value(one: Fraction, other: Fraction) -> bool:
    """Return whether values are equal; a fraction without a finite decimal also equals its decimal of six places."""
    if one == other:
        return True
    endless, decimal = (other, one) if _is_decimal(one) else (one, other)
    if _is_decimal(endless) or not _is_decimal(decimal):
        return False
    # The relative bound is for tiny fractions, whose six places would be zeros.
    return abs(endless - decimal) <= min(Fraction(1, 2 * 10**6), abs(endless) / 1000)


def _is_decimal(value: Fraction) -> bool:
    """Return whether a value has a finite decimal."""
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest == 1


def _value(kind: str, parts: tuple[str | None, ...]) -> Fraction | None:
    first, second, third = (*parts, None, None)[:3]
    if kind == "repeating":
        return _repeating(first or "", second or "")
    numbers = [_decimal(part) if part else None for part in (first, second, third)]
    if kind == "power":
        base = Fraction(1) if first == "" else numbers[0]
        exponent = int(second or third or 0)
        return None if base is None or abs(exponent) > _LONGEST else base * Fraction(10) ** exponent
    if kind == "decimal":
        return numbers[0]
    whole = Fraction(0) if kind == "fraction" else numbers[0]
    above, below = numbers[:2] if kind == "fraction" else numbers[1:]
    if whole is None or above is None or not below:
        return None
    return whole + above / below


def _decimal(written: str) -> Fraction | None:
    try:
        return Fraction(Decimal(re.sub("[, ]", "", written)))
    except (InvalidOperation, ValueError):
        return None


def _repeating(before: str, period: str) -> Fraction | None:
    start = _decimal(before + "0")
    if start is None:
        return None
    places = len(before.partition(".")[2])
    return start + Fraction(int(period), (10 ** len(period) - 1) * 10**places)


def _without_parentheses(text: str) -> str:
    """Return `-5` for `(-5)`; a list in parentheses is unchanged."""
    while text.startswith("(") and text.endswith(")") and "(" not in text[1:] and ")" not in text[:-1]:
        text = text[1:-1].strip()
    if text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


_WRITTEN: Final = re.compile(
    r"([-+]?)\s*([0-9A-Z][0-9A-Z, ]*(?:\.[0-9A-Z]+)?)\s*_\s*"
    r"(?:\{\s*(?:\\(?:text|mathrm|textrm)\s*\{)?\s*(?:base\s+)?([0-9]{1,2}|[a-z]+)\s*\}{1,2}|([0-9]))"
)
_WORDS: Final = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "sixteen": 16}


class Numeral(NamedTuple):
    """Digits and their base; digits as written, without blanks, commas and leading zeros."""

    digits: str
    base: int


def numeral_in_clean(text: str) -> Numeral | None:
    """Return the digits and the base of a cleaned text; None if it is not a number in a base from 2 to 36."""
    match = _WRITTEN.fullmatch(text.strip())
    if match is None:
        return None
    sign, digits, braced, plain = match.groups()
    named = braced or plain
    base = int(named) if named.isdecimal() else _WORDS.get(named, 0)
    digits = re.sub("[, ]", "", digits)
    highest = max(int(digit, 36) for digit in digits if digit != ".")
    if not 2 <= base <= 36 or highest >= base:
        return None
    return Numeral(("-" if sign == "-" else "") + (digits.lstrip("0") or "0"), base)
