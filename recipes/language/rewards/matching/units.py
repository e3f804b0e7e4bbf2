"""The units that may follow a number, and the words that are none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from recipes.language.rewards.matching.cleaning import TEXT_COMMAND, closing_brace

# Measures that are not to be mixed up, by one name, with their spellings (a final s is left out).
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
# Words behind a number that say something about its value, or begin another part of a sentence.
_VALUE_WORDS: Final = """
    and or not the but with plus minus times over mod choose divided squared cubed factorial root dozen half halves
    third thirds quarter quarters fourth fifth sixth tenth tenths hundredth hundredths percentile to power base
    sin cos tan cot sec csc log exp lim max gcd lcm det sqrt arcsin arccos arctan sum prod inf
"""
_NO_UNITS: Final = frozenset(_VALUE_WORDS.split()) - {"sec"}
# Units of one letter or two that no variables are, where a blank parts them from the number.
_SHORT: Final = frozenset(("mm", "cm", "dm", "km", "ft", "yd", "kg", "mg", "lb", "oz", "ml", "mL", "in", "hr"))
_SYMBOLS: Final = "NJWVAKCFHT"
_LONG_WORD: Final = 3
_EXPONENT: Final = r"(?:\s*\^\s*(?:\{\s*-?[0-9]+\s*\}|-?[0-9]+))?"
_WORD: Final = re.compile(rf"\s*((?:square|cubic|sq\.?|cu\.?)\s+)?\\?([A-Za-z]+|°[CF]?|[%$€£¥¢])\.?({_EXPONENT})")
_BETWEEN: Final = re.compile(r"\s*(?:/|\\cdot|\*|-(?=[A-Za-z])|\bper\b)\s*|\s*")


class MeasureUnit(NamedTuple):
    """The unit of a number: its factor, and the name of a known quantity."""

    factor: int
    name: str


def parse_unit(text: str) -> MeasureUnit | None:
    """Return the unit that a text is, all of it; None where it is anything else. An empty text is no unit at all."""
    text = text.rstrip()
    if not text:
        return MeasureUnit(1, "")
    # `9 (apples)`
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
    # A speed, or "red apples", is compared by its number alone.
    return MeasureUnit(factor, names[0] if len(names) == 1 else "")


def _is_unit(word: str, *, blank: bool, marked: bool) -> bool:
    """Return whether a word is a unit.

    Args:
        word: the word.
        blank: whether a blank parts it from what is before it.
        marked: whether it is written as words, or as a divisor of a unit, so that it is not a variable.
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
