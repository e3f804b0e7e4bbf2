r"""Sets of real numbers written as inequalities or intervals, compared as sets.

    region   = part, or parts joined by `or`, `\lor`, `\cup`
    part     = piece, or pieces joined by `and`, `\land`, `\cap`
    piece    = chain of two or three sides, one of them the variable: `x < 3`, `0 < x \le 1`, `x \ne 2`
             | [variable \in] interval, such as `(-\infty, 3]`

A comma between inequalities may mean either word, so such a text has two readings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Final, NamedTuple, TypeAlias

from recipes.language.rewards.matching.numbers import number_in_clean

# A place just before (-1) or just after (1) a value. Intervals run from one place to another.
Place: TypeAlias = tuple[Fraction | float, int]
Interval: TypeAlias = tuple[Place, Place]

_WORD: Final = r"\s*(?:(?<![A-Za-z\\]){0}(?![A-Za-z])|\\text\s*\{{\s*{0}\s*\}}|\\(?:{1})(?![A-Za-z]))\s*"
_OR: Final = re.compile(_WORD.format("or", "lor|vee|cup"))
_AND: Final = re.compile(_WORD.format("and", "land|wedge|cap"))
_RELATION: Final = re.compile(r"\s*(<=|>=|<|>|=|\\(?:le|ge|lt|gt|ne)(?![A-Za-z]))\s*")
_SIGNS: Final = {r"\le": "<=", r"\ge": ">=", r"\lt": "<", r"\gt": ">", r"\ne": "!="}
_MIRRORED: Final = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_INTERVAL: Final = re.compile(r"(?:([A-Za-z])\s*\\in\s*)?([\[(])\s*([^,\[\]()]+?)\s*,\s*([^,\[\]()]+?)\s*([\])])")
_INFINITE: Final = re.compile(r"([-+]?)\s*\\infty")
_FIRST: Final[Place] = (-math.inf, 1)
_LAST: Final[Place] = (math.inf, -1)
_EVERYTHING: Final[tuple[Interval, ...]] = ((_FIRST, _LAST),)


class Region(NamedTuple):
    """A set of numbers.

    Attributes:
        intervals: the disjoint intervals, in order.
        variables: the name of the variable; empty if only intervals are written.
        is_joined: whether the text has several inequalities or intervals.
    """

    intervals: tuple[Interval, ...]
    variables: frozenset[str]
    is_joined: bool


def same_region(gold: str, guess: str) -> bool | None:
    """Return whether two cleaned texts are the same set; None if a side is no set, or neither side joins several."""
    left, right = _regions(gold), _regions(guess)
    if not left or not right or not (left[0].is_joined or right[0].is_joined):
        return None
    return any(
        one.intervals == other.intervals and len(one.variables | other.variables) <= 1
        for one in left
        for other in right
    )


def _regions(text: str) -> list[Region]:
    """Return the possible regions of a text: none, one, or two if commas join inequalities."""
    readings = [text]
    if "," in text and not re.search(r"[\[({]", text):
        readings = [text.replace(",", f" {word} ") for word in ("or", "and")]
    return [region for region in map(_region, readings) if region is not None]


def _region(text: str) -> Region | None:
    parts = [[piece.strip(" $") for piece in _AND.split(part)] for part in _OR.split(text)]
    variables: set[str] = set()
    read = [[_piece(piece, variables) for piece in part] for part in parts]
    known = [[piece for piece in part if piece is not None] for part in read]
    if [*map(len, known)] != [*map(len, read)] or len(variables) > 1:
        return None
    intervals = _union(interval for part in known for interval in _common(part))
    return Region(intervals, frozenset(variables), sum(map(len, parts)) > 1)


def _piece(text: str, variables: set[str]) -> tuple[Interval, ...] | None:
    """Return the numbers of an inequality or interval, and add its variable to `variables`."""
    if match := _INTERVAL.fullmatch(text):
        name, begin, low, high, end = match.groups()
        ends = [_number(low), _number(high)]
        if ends[0] is None or ends[1] is None:
            return None
        variables.update([name] if name else [])
        return _between((ends[0], 1 if begin == "(" else -1), (ends[1], -1 if end == ")" else 1))
    sides = _RELATION.split(text)
    if not sides[0] and len(variables) == 1:
        # Complete `x < -1 or > 1`.
        sides[0] = next(iter(variables))
    at = next((index for index in range(0, len(sides), 2) if re.fullmatch("[A-Za-z]", sides[index])), None)
    if at is None or len(sides) not in (3, 5) or (len(sides) == 5 and at != 2):
        return None
    variables.add(sides[at])
    chain: list[tuple[Interval, ...]] = []
    for index in (at - 1, at + 1):
        if not 0 < index < len(sides):
            continue
        sign, number = _SIGNS.get(sides[index], sides[index]), _number(sides[2 * index - at])
        if number is None:
            return None
        chain.append(_bounded(sign if index > at else _MIRRORED.get(sign, sign), number))
    return _common(chain)


def _number(text: str) -> Fraction | float | None:
    if infinite := _INFINITE.fullmatch(text.strip()):
        return -math.inf if infinite.group(1) == "-" else math.inf
    number = number_in_clean(text)
    return None if number is None or number.unit else number.value


def _bounded(sign: str, number: Fraction | float) -> tuple[Interval, ...]:
    """Return the numbers x for which `x sign number` is true."""
    before, after = (number, -1), (number, 1)
    match sign:
        case "<":
            return _between(_FIRST, before)
        case "<=":
            return _between(_FIRST, after)
        case ">":
            return _between(after, _LAST)
        case ">=":
            return _between(before, _LAST)
        case "!=":
            return (*_between(_FIRST, before), *_between(after, _LAST))
        case _:
            return _between(before, after)


def _between(low: Place, high: Place) -> tuple[Interval, ...]:
    low, high = max(low, _FIRST), min(high, _LAST)
    return ((low, high),) if low < high else ()


def _common(sets: Sequence[tuple[Interval, ...]]) -> tuple[Interval, ...]:
    common = _EVERYTHING
    for intervals in sets:
        common = tuple(
            shared
            for one in common
            for other in intervals
            for shared in _between(max(one[0], other[0]), min(one[1], other[1]))
        )
    return common


def _union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    union: list[Interval] = []
    for low, high in sorted(intervals):
        if union and low <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], high))
        else:
            union.append((low, high))
    return tuple(union)
