"""Rank expressions: `0-3,5` for sets of ranks, `0-1:0-3,3-5` for resources mapped to processes.

    RANKS     := "all" | RANGE ("," RANGE)*
    RANKMAP   := PART ("," PART)*
    PART      := ("all" | RANGE) [":" RANGE]
    RANGE     := INT | INT "-" INT                 inclusive; spaces are allowed around every token

Ranges stay ranges: `0-79999` costs as much as `0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rlinf_core.config.source import NotationError

_RANGE = re.compile(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?\Z", re.ASCII)
# Far above any real cluster, far below where a range would no longer be a machine integer.
MAX_RANK = 10**9


class RankSyntaxError(NotationError):
    """A rank expression that cannot be read."""


class RankMapPart(NamedTuple):
    """`RESOURCES[:PROCESSES]` of a rank map; `resources` is None for `all`.

    `start` and `end` are the part's offsets, without surrounding blanks, in the text that was read: the whole
    value, or item `item` of it when the map was written as a list.
    """

    resources: range | None
    processes: range | None
    start: int
    end: int
    item: int | None = None

    def __str__(self) -> str:
        resources = "all" if self.resources is None else format_range(self.resources)
        return resources if self.processes is None else f"{resources}:{format_range(self.processes)}"


def format_range(ranks: range) -> str:
    """Return `3` or `0-7`; the inverse of reading one."""
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start}-{ranks.stop - 1}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return the shortest expression for ascending ranks: `[0, 1, 2, 5]` is `0-2,5`."""
    runs: list[range] = []
    for rank in ranks:
        if runs and runs[-1].stop == rank:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return ",".join(format_range(run) for run in runs)


def merge_ranges(ranges: Iterable[range]) -> tuple[range, ...]:
    """Return the same numbers as ascending ranges that neither overlap nor touch."""
    merged: list[range] = []
    for piece in sorted((piece for piece in ranges if piece), key=lambda piece: piece.start):
        if merged and piece.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, piece.stop))
        else:
            merged.append(piece)
    return tuple(merged)


def parse_ranks(text: str) -> tuple[range, ...] | None:
    """Return the ranges of `0-3,5` as written; None for `all`.

    Ascending order and overlaps are not judged here: a caller that has positions does that.

    Raises:
        RankSyntaxError: the text is not a rank expression.
    """
    if text.strip() == "all":
        return None
    return tuple(_parse_range(text[start:end], start) for start, end in _pieces(text, ",", 0, len(text)))


def parse_rank_map(text: str, item: int | None = None) -> tuple[RankMapPart, ...]:
    """Return the parts of a rank map as written; order, gaps and counts are not judged here.

    `item` is remembered in the parts: the index of `text` in a map that was written as a list.

    Raises:
        RankSyntaxError: the text is not a rank map.
    """
    return tuple(_parse_part(text, start, end, item) for start, end in _pieces(text, ",", 0, len(text)))


def _parse_part(text: str, start: int, end: int, item: int | None) -> RankMapPart:
    pieces = list(_pieces(text, ":", start, end))
    if len(pieces) > 2:
        raise RankSyntaxError(
            f"`{text[start:end].strip()}` has more than one `:`",
            pieces[2][0] - 1,
            end,
            "write RESOURCES:PROCESSES",
        )
    resource_text = text[pieces[0][0] : pieces[0][1]]
    resources = None if resource_text.strip() == "all" else _parse_range(resource_text, pieces[0][0])
    processes = None
    if len(pieces) == 2:
        process_text = text[pieces[1][0] : pieces[1][1]]
        if process_text.strip() == "all":
            raise RankSyntaxError(
                "`all` cannot stand for process ranks",
                *_stripped(text, *pieces[1]),
                "give them, as in `all:0-7`",
            )
        processes = _parse_range(process_text, pieces[1][0])
    return RankMapPart(resources, processes, *_stripped(text, start, end), item)


def _pieces(text: str, separator: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    at = start
    while True:
        found = text.find(separator, at, end)
        yield at, end if found < 0 else found
        if found < 0:
            return
        at = found + 1


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    piece = text[start:end]
    left = start + len(piece) - len(piece.lstrip())
    return left, max(left, start + len(piece.rstrip()))


def _parse_range(piece: str, offset: int) -> range:
    match = _RANGE.match(piece)
    if match is None:
        start, end = _stripped(piece, 0, len(piece))
        shown = piece[start:end]
        message = f"`{shown}` is not a rank or a range" if shown else "a rank or a range is missing here"
        raise RankSyntaxError(message, offset + start, offset + end, "write `3`, `0-7` or `0-3,5`")
    start, end = _stripped(piece, 0, len(piece))
    first, last = match[1], match[2] or match[1]
    if len(first) > 10 or len(last) > 10 or int(last) > MAX_RANK or int(first) > MAX_RANK:
        raise RankSyntaxError(f"ranks end at {MAX_RANK}", offset + start, offset + end)
    if int(last) < int(first):
        raise RankSyntaxError(
            f"`{piece[start:end]}` runs backwards",
            offset + start,
            offset + end,
            f"did you mean `{last}-{first}`?",
        )
    return range(int(first), int(last) + 1)
