"""Rank expressions as configuration values: node ranks and rank maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, cast

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from rlinf_core.config.model import Finding, several
from rlinf_core.config.ranks import RankMapPart, RankSyntaxError, parse_rank_map
from rlinf_core.scalars import problem, text_of


def _schema(part: str) -> dict[str, Any]:
    """Return the JSON schema of text with comma-separated parts, or a list of them, possibly with references."""
    text = {"type": ["string", "integer"], "pattern": rf"^\s*{part}(,\s*{part})*$|\$\{{"}
    return {**text, "type": [*text["type"], "array"], "items": text, "minItems": 1}


_RANGE = r"[0-9]+\s*(-\s*[0-9]+\s*)?"
_NODE_RANKS = _schema(rf"(all\s*|{_RANGE})")
RANK_MAP_SCHEMA = _schema(rf"(all\s*|{_RANGE})(:\s*{_RANGE})?")


class RankPlace(NamedTuple):
    """The place where a range was written: offsets in the scalar's text, or in item `item` of a list."""

    start: int
    end: int
    item: int | None = None


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """The nodes that `node_ranks` names, as written: neither the order nor the bounds are judged here.

    Attributes:
        text: what was written, list items joined by commas.
        ranges: one range per piece; None for `all`.
        places: where each of `ranges` was written, for pointing at it; empty for `all`.
    """

    text: str
    ranges: tuple[range, ...] | None
    places: tuple[RankPlace, ...] = ()

    def __str__(self) -> str:
        return self.text

    def __contains__(self, rank: int) -> bool:
        return self.ranges is None or any(rank in piece for piece in self.ranges)

    def resolve(self, num_nodes: int) -> tuple[int, ...]:
        """Return the ranks it names among 0 .. num_nodes-1, ascending, each once."""
        if self.ranges is None:
            return tuple(range(num_nodes))
        ranks: set[int] = set()
        for piece in self.ranges:
            ranks.update(range(piece.start, min(piece.stop, num_nodes)))
        return tuple(sorted(ranks))

    @staticmethod
    def parse(value: Any) -> NodeRanks:
        """Read `3`, `0-7`, `0-3,5`, a list of such, or `all`."""
        text, parts = _read(value, "a node rank, a range such as `0-7`, a list of them, or `all`", _node_parts)
        if any(part.resources is None for part in parts):
            return NodeRanks("all", None)
        ranges = tuple(part.resources for part in parts if part.resources is not None)
        return NodeRanks(text, ranges, tuple(RankPlace(part.start, part.end, part.item) for part in parts))


@dataclass(frozen=True, slots=True)
class RankMap:
    """The resources that a component's processes sit on, as written: order, gaps and counts are not judged here.

    Attributes:
        text: what was written, list items joined by commas.
        parts: the pieces, each with its place.
    """

    text: str
    parts: tuple[RankMapPart, ...]

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def parse(value: Any) -> RankMap:
        """Read `0-7`, `0-1:0-199,2-3:200-399`, `all`, or a list of such parts."""
        return RankMap(*_read(value, "a rank map such as `0-7` or `0-1:0-3`, or a list of its parts", parse_rank_map))


def _node_parts(text: str, item: int | None) -> tuple[RankMapPart, ...]:
    colon = text.find(":")
    if colon >= 0:
        raise RankSyntaxError("node ranks have no `:`", colon, colon + 1, "write `3`, `0-7` or `0-3,5`")
    parts = parse_rank_map(text, item)
    for part in parts:
        if part.resources is None and (len(parts) > 1 or item is not None):
            raise RankSyntaxError("`all` stands alone", part.start, part.end, "write `node_ranks: all`")
    return parts


def _read(
    value: Any, what: str, parse: Callable[[str, int | None], tuple[RankMapPart, ...]]
) -> tuple[str, tuple[RankMapPart, ...]]:
    if not isinstance(value, list):
        text = text_of(value, what)
        try:
            return text, parse(text, None)
        except RankSyntaxError as error:
            raise _finding(error) from None
    items = cast("list[Any]", value)
    if not items:
        raise problem("rank-syntax", "the list is empty", help=f"write {what}")
    texts: list[str] = []
    parts: list[RankMapPart] = []
    findings: list[Finding] = []
    for index, item in enumerate(items):
        try:
            texts.append(text_of(item, "a rank or a range such as `0-7`"))
            parts.extend(parse(texts[-1], index))
        except RankSyntaxError as error:
            findings.append(((index,), _finding(error), item))
        except PydanticCustomError as error:
            findings.append(((index,), error, item))
    if findings:
        raise several(findings)
    return ",".join(texts), tuple(parts)


def _finding(error: RankSyntaxError) -> PydanticCustomError:
    return problem("rank-syntax", error.message, help=error.help, start=error.start, end=error.end)


NodeRanksField = Annotated[NodeRanks, PlainValidator(NodeRanks.parse), WithJsonSchema(_NODE_RANKS)]
RankMapField = Annotated[RankMap, PlainValidator(RankMap.parse), WithJsonSchema(RANK_MAP_SCHEMA)]
