r"""Numbers written in a base, as `101_2` and `1A_{\text{sixteen}}`."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_WRITTEN: Final = re.compile(
    r"([-+]?)\s*([0-9A-Z][0-9A-Z, ]*(?:\.[0-9A-Z]+)?)\s*_\s*"
    r"(?:\{\s*(?:\\(?:text|mathrm|textrm)\s*\{)?\s*(?:base\s+)?([0-9]{1,2}|[a-z]+)\s*\}{1,2}|([0-9]))"
)
_WORDS: Final = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "sixteen": 16}


class Numeral(NamedTuple):
    """Digits and their base; digits as written, without blanks, commas, and zeros in front."""

    digits: str
    base: int


def numeral_in_clean(text: str) -> Numeral | None:
    """Return the digits and the base of a cleaned text; None where it is not a number in a base from 2 to 36."""
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
