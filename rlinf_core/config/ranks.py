"""Rank expressions: `0-3,5` for sets of ranks, `0-1:0-3,3-5` for resources mapped to processes.

    RANKS     := "all" | RANGE ("," RANGE)*
    RANKMAP   := PART ("," PART)*
    PART      := ("all" | RANGE) [":" RANGE]
    RANGE     := INT | INT "-" INT                 inclusive; spaces are allowed around every token

Ranges stay ranges: `0-79999` costs as much as `0`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeAlias, cast

from pydantic import PlainValidator, WithJsonSchema

from rlinf_core.config.model import listed, read_each, refused
from rlinf_core.config.tree import NamePiece, NotationError, name_pieces
from rlinf_core.scalars import problem, text_of

_RANGE = re.compile(r"([0-9]+)\s*(?:-\s*([0-9]+))?\Z", re.ASCII)
# Such as the full-width comma and colon of Chinese text, or a dash.
_NOT_ASCII = re.compile(r"[^\s\x00-\x7f]")
# Far above any real cluster, and far below the limit of machine integers.
MAX_RANK = 10**9


class RankMapPart(NamedTuple):
    """`RESOURCES[:PROCESSES]` of a rank map; `resources` is None for `all`.

    `start` and `end` are the stripped part's offsets in the whole value or in item `item` of a list.
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
    """Return `3` or `0-7`; the inverse of parsing."""
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


def nodes_text(ranks: Iterable[int]) -> str:
    """Return `node 3` or `nodes 0-2,5` for ranks in any order."""
    listed = format_ranks(sorted(ranks))
    return f"node{'s' * (not listed.isdecimal())} {listed}"


def merge_ranges(ranges: Iterable[range]) -> tuple[range, ...]:
    """Return the same numbers as ascending ranges that neither overlap nor touch."""
    merged: list[range] = []
    for piece in sorted((piece for piece in ranges if piece), key=lambda piece: piece.start):
        if merged and piece.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, piece.stop))
        else:
            merged.append(piece)
    return tuple(merged)


def common(first: range, second: range) -> range:
    """Return the numbers in both ranges."""
    return range(max(first.start, second.start), min(first.stop, second.stop))


def intersect(a: tuple[range, ...], b: tuple[range, ...]) -> tuple[range, ...]:
    """Return the numbers in both of two lists of ascending, disjoint ranges."""
    shared: list[range] = []
    i = j = 0
    while i < len(a) and j < len(b):
        overlap = common(a[i], b[j])
        if overlap:
            shared.append(overlap)
        if a[i].stop <= b[j].stop:
            i += 1
        else:
            j += 1
    return tuple(shared)


def subtract(pieces: Iterable[range], taken: Sequence[range]) -> tuple[range, ...]:
    """Return, piece by piece, the numbers of `pieces` that are not in `taken`, which is ascending and disjoint."""
    remaining: list[range] = []
    for piece in pieces:
        at = piece.start
        index = bisect_right(taken, at, key=lambda range_: range_.stop)
        while index < len(taken) and taken[index].start < piece.stop:
            if taken[index].start > at:
                remaining.append(range(at, taken[index].start))
            at = taken[index].stop
            index += 1
        if at < piece.stop:
            remaining.append(range(at, piece.stop))
    return tuple(remaining)


def parse_ranks(text: str) -> tuple[range, ...] | None:
    """Return the ranges of `0-3,5` as written; None for `all`. Order and overlaps are not checked.

    Raises:
        NotationError: the text is not a rank expression.
    """
    if text.strip() == "all":
        return None
    return tuple(_parse_range(piece) for piece in name_pieces(text))


def parse_rank_map(text: str, item: int | None = None) -> tuple[RankMapPart, ...]:
    """Return the parts of a rank map, or of item `item` of a list, as written; counts are not checked.

    Raises:
        NotationError: the text is not a rank map.
    """
    if (foreign := _NOT_ASCII.search(text)) is not None:
        message = f"ranks cannot contain `{foreign[0]}`"
        raise NotationError(message, *foreign.span(), "write ASCII digits, `,`, `-` and `:`")
    return tuple(_parse_part(part, item) for part in name_pieces(text))


def _parse_part(part: NamePiece, item: int | None) -> RankMapPart:
    text, start, end = part
    first, *others = name_pieces(text, ":", start)
    if len(others) > 1:
        second = start + text.index(":", text.index(":") + 1)
        raise NotationError(f"`{text}` has more than one `:`", second, end, "write RESOURCES:PROCESSES")
    resources = None if first.name == "all" else _parse_range(first)
    for processes in others:
        if processes.name == "all":
            message = "`all` cannot be used for process ranks"
            raise NotationError(message, processes.start, processes.end, "write them out, as in `all:0-7`")
    return RankMapPart(resources, _parse_range(others[0]) if others else None, start, end, item)


def _parse_range(piece: NamePiece) -> range:
    shown, start, end = piece
    match = _RANGE.match(shown)
    if match is None:
        message = f"`{shown}` is not a rank or a range" if shown else "a rank or a range is missing here"
        raise NotationError(message, start, end, "write `3`, `0-7` or `0-3,5`")
    first, last = match[1], match[2] or match[1]
    if len(first) > 10 or len(last) > 10 or int(last) > MAX_RANK or int(first) > MAX_RANK:
        raise NotationError(f"the highest rank is {MAX_RANK}", start, end)
    if int(last) < int(first):
        raise NotationError(f"`{shown}` runs backwards", start, end, f"did you mean `{last}-{first}`?")
    return range(int(first), int(last) + 1)


# As values of a file


def _schema(part: str) -> dict[str, Any]:
    """Return the JSON schema of comma-separated text, or a list, possibly with references."""
    pattern = rf"^\s*{part}(,\s*{part})*$|\$\{{"
    text: dict[str, Any] = {"type": ["string", "integer"], "pattern": pattern, "minimum": 0, "maximum": MAX_RANK}
    return {**text, "type": [*text["type"], "array"], "items": text, "minItems": 1}


_RANGE_PATTERN = r"[0-9]+\s*(-\s*[0-9]+\s*)?"
_NODE_RANKS = _schema(rf"(all\s*|{_RANGE_PATTERN})")
RANK_MAP_SCHEMA = _schema(rf"(all\s*|{_RANGE_PATTERN})(:\s*{_RANGE_PATTERN})?")


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """The nodes in `node_ranks`, as written: neither order nor bounds are checked.

    Attributes:
        text: what was written, list items joined by commas.
        ranges: one range per piece; None for `all`.
        parts: the part of each of `ranges`, with its position; empty for `all`.
    """

    text: str
    ranges: tuple[range, ...] | None
    parts: tuple[RankMapPart, ...] = ()

    def __str__(self) -> str:
        return self.text

    def __contains__(self, rank: int) -> bool:
        return self.ranges is None or any(rank in piece for piece in self.ranges)

    def resolve(self, num_nodes: int) -> tuple[int, ...]:
        """Return the ranks within 0 .. num_nodes-1, ascending and unique."""
        if self.ranges is None:
            return tuple(range(num_nodes))
        ranks: set[int] = set()
        for piece in self.ranges:
            ranks.update(range(piece.start, min(piece.stop, num_nodes)))
        return tuple(sorted(ranks))

    @staticmethod
    def parse(value: Any) -> NodeRanks:
        """Parse `3`, `0-7`, `0-3,5`, a list of such, or `all`."""
        text, parts = _read(value, "a node rank, a range such as `0-7`, a list of them, or `all`", _node_parts)
        if any(part.resources is None for part in parts):
            return NodeRanks("all", None)
        ranges = tuple(part.resources for part in parts if part.resources is not None)
        return NodeRanks(text, ranges, parts)


@dataclass(frozen=True, slots=True)
class RankMap:
    """The resources of a component's processes, as written; list items are joined by commas."""

    text: str
    parts: tuple[RankMapPart, ...]

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def parse(value: Any) -> RankMap:
        """Parse `0-7`, `0-1:0-199,2-3:200-399`, `all`, or a list of such parts."""
        return RankMap(*_read(value, "a rank map such as `0-7` or `0-1:0-3`, or a list of its parts", parse_rank_map))


def _node_parts(text: str, item: int | None) -> tuple[RankMapPart, ...]:
    colon = text.find(":")
    if colon >= 0:
        raise NotationError("node ranks have no `:`", colon, colon + 1, "write `3`, `0-7` or `0-3,5`")
    parts = parse_rank_map(text, item)
    for part in parts:
        if part.resources is None and (len(parts) > 1 or item is not None):
            raise NotationError("`all` cannot be combined", part.start, part.end, "write `node_ranks: all`")
    return parts


_Parse: TypeAlias = "Callable[[str, int | None], tuple[RankMapPart, ...]]"


def _read(value: Any, what: str, parse: _Parse) -> tuple[str, tuple[RankMapPart, ...]]:
    if not isinstance(value, list):
        return _parsed(value, what, parse, None)
    items = cast("list[Any]", value)
    if not items:
        raise problem("rank-syntax", "the list is empty", help=f"write {what}")
    pairs = read_each(
        listed(items), lambda at, item: _parsed(item, "a rank or a range such as `0-7`", parse, int(at[0]))
    )
    return ",".join(text for text, _ in pairs), tuple(part for _, parts in pairs for part in parts)


def _parsed(value: Any, what: str, parse: _Parse, item: int | None) -> tuple[str, tuple[RankMapPart, ...]]:
    text = text_of(value, what)
    try:
        return text, parse(text, item)
    except NotationError as error:
        raise refused("rank-syntax", error) from None


NodeRanksField = Annotated[NodeRanks, PlainValidator(NodeRanks.parse), WithJsonSchema(_NODE_RANKS)]
RankMapField = Annotated[RankMap, PlainValidator(RankMap.parse), WithJsonSchema(RANK_MAP_SCHEMA)]
