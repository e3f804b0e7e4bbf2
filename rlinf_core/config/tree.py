"""Source texts and positions in them, and a configuration as a tree whose nodes know their position in the source.

A `SourceText` is a file, standard input, or the arguments of a command. A `Span` is a part of one of them.

Reading creates such trees, composition creates new ones from them, and `to_data` converts one to plain data for
validation. Nodes are immutable; spans within one tree may belong to different sources.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeAlias

from rlinf_core.scalars import YamlBool, YamlFloat, YamlInt

OVERRIDES_NAME = "<overrides>"
STDIN_NAME = "<stdin>"
# The last number of a file's layer. Its bases have 0, 1, ... in that place, and so come first.
_OWN: Final = math.inf


class Position(NamedTuple):
    """A position in a text. Lines and columns count from 1, columns in code points."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


@dataclass(frozen=True, eq=False)
class SourceText:
    """A text with its display name. Of kind "overrides", every line is a command-line argument.

    Attributes:
        own_layer: the layer of a file, see `layer`.
    """

    name: str
    text: str = field(repr=False)
    kind: Literal["file", "stdin", "overrides"] = "file"
    own_layer: tuple[float, ...] = field(default=(_OWN,), repr=False)

    @property
    def layer(self) -> tuple[float, ...]:
        """The precedence among the texts of a composed configuration; values of a greater layer win."""
        return (_OWN, _OWN) if self.kind == "overrides" else self.own_layer

    @property
    def is_quotable(self) -> bool:
        """Whether findings may show its lines: a base not named like a configuration may hold passwords."""
        return self.own_layer == (_OWN,) or self.name.endswith((".yaml", ".yml", ".json"))

    def as_base(self, of: SourceText, index: int) -> SourceText:
        """Return this text as base number `index` of the text `of`."""
        return replace(self, own_layer=(*of.own_layer[:-1], index, _OWN))

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(newline.end() for newline in re.finditer("\n", self.text))]

    def position(self, offset: int) -> Position:
        """Return the line and column of a code point offset; an offset past the end is the end."""
        offset = max(0, min(offset, len(self.text)))
        index = bisect_right(self._line_starts, offset) - 1
        return Position(index + 1, offset - self._line_starts[index] + 1)

    def line(self, number: int) -> str:
        """Return line `number` (from 1) without its line end."""
        start = self._line_starts[number - 1]
        end = self._line_starts[number] if number < len(self._line_starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")


class NotationError(ValueError):
    """A text with invalid syntax: hosts, ranks, a path, a reference.

    Attributes:
        start, end: the invalid part, as offsets into the given text.
    """

    def __init__(self, message: str, start: int, end: int, help: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.start = start
        self.end = end
        self.help = help


class Span(NamedTuple):
    """The code points from `start` to before `end` of a source."""

    source: SourceText
    start: int
    end: int

    @property
    def begin(self) -> Position:
        return self.source.position(self.start)

    @property
    def finish(self) -> Position:
        """The position just after the last code point."""
        return self.source.position(self.end)

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    def part(self, start: int, end: int) -> Span:
        """Return the sub-span between two offsets relative to this one, clipped to it."""
        size = self.end - self.start
        start = max(0, min(start, size))
        return Span(self.source, self.start + start, self.start + max(start, min(end, size)))

    def __str__(self) -> str:
        return f"{self.source.name}:{self.begin}"


Path: TypeAlias = tuple["str | int", ...]
Value: TypeAlias = "None | bool | int | float | str | list[Value] | dict[str, Value]"


@dataclass(frozen=True, eq=False, slots=True)
class ScalarNode:
    """A single value. `raw` is its text as written (unescaped, unquoted), `value` its YAML 1.2 core value.

    `plain` is False for quoted and block scalars, whose value is always `raw`.
    """

    span: Span
    raw: str
    value: bool | int | float | str | None
    plain: bool = True


@dataclass(frozen=True, eq=False, slots=True)
class SequenceNode:
    span: Span
    items: tuple[Node, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """One `key: value` of a mapping.

    Attributes:
        replaced: the entries of lower layers that it replaces, highest layer first.
    """

    key: ScalarNode
    value: Node
    replaced: tuple[Entry, ...] = ()


@dataclass(frozen=True, eq=False)
class MappingNode:
    """Entries in the order written; their keys' raw texts are unique."""

    span: Span
    entries: tuple[Entry, ...]

    @cached_property
    def _by_key(self) -> dict[str, Entry]:
        return {entry.key.raw: entry for entry in self.entries}

    def entry(self, key: str) -> Entry | None:
        return self._by_key.get(key)

    def get(self, key: str) -> Node | None:
        entry = self._by_key.get(key)
        return entry.value if entry else None

    def keys(self) -> Iterator[str]:
        return iter(self._by_key)


Node: TypeAlias = ScalarNode | SequenceNode | MappingNode


def child(node: Node, segment: str | int) -> Node | None:
    """Return the child node for one path segment, or None."""
    if isinstance(node, MappingNode):
        return node.get(str(segment))
    if isinstance(node, SequenceNode) and isinstance(segment, int) and 0 <= segment < len(node.items):
        return node.items[segment]
    return None


def is_null(node: Node) -> bool:
    """Return whether a value is null, whether written or empty."""
    return isinstance(node, ScalarNode) and node.value is None


def children(node: Node) -> Iterator[tuple[str | int, Node]]:
    """Yield the direct children of a node, each with its path segment; none for a scalar."""
    if isinstance(node, MappingNode):
        yield from ((entry.key.raw, entry.value) for entry in node.entries)
    elif isinstance(node, SequenceNode):
        yield from enumerate(node.items)


def scalars(node: Node, path: Path = ()) -> Iterator[tuple[Path, ScalarNode]]:
    """Yield the scalars at and below a node at `path`, each with its path."""
    if isinstance(node, ScalarNode):
        yield path, node
    for segment, value in children(node):
        yield from scalars(value, (*path, segment))


def find(node: Node, path: Path) -> Node | None:
    """Return the node at `path`, or None."""
    current: Node | None = node
    for segment in path:
        if current is None:
            return None
        current = child(current, segment)
    return current


def key_span(node: Node, path: Path) -> Span | None:
    """Return the span of the key of the mapping entry at `path`, or None for a list item or a missing path."""
    entry = entry_at(node, path)
    return entry.key.span if entry else None


def entry_at(node: Node, path: Path) -> Entry | None:
    """Return the mapping entry at `path`; None for a list item or a missing path."""
    parent = find(node, path[:-1]) if path else None
    return parent.entry(str(path[-1])) if isinstance(parent, MappingNode) else None


def merge(base: Node, over: Node) -> Node:
    """Return `base` overridden by `over`.

    Keys keep the order of `base`; new keys follow. Spans are those of the last layer that sets a value.
    """
    if not (isinstance(base, MappingNode) and isinstance(over, MappingNode)):
        return over
    entries = {entry.key.raw: entry for entry in base.entries}
    for entry in over.entries:
        earlier = entries.get(entry.key.raw)
        if earlier is not None:
            replaced = (*entry.replaced, earlier, *earlier.replaced)
            entry = Entry(entry.key, merge(earlier.value, entry.value), replaced)
        entries[entry.key.raw] = entry
    return MappingNode(over.span, tuple(entries.values()))


_WRITTEN: Final[dict[type, type[YamlBool | YamlInt | YamlFloat]]] = {bool: YamlBool, int: YamlInt, float: YamlFloat}


def to_data(node: Node) -> Value:
    """Return plain data for validation. Numbers and booleans keep their text as `.raw` (see `rlinf_core.scalars`)."""
    if isinstance(node, ScalarNode):
        value = node.value
        if value is None or isinstance(value, str):
            return value
        return _WRITTEN[type(value)](value, node.raw)
    if isinstance(node, SequenceNode):
        return [to_data(item) for item in node.items]
    return {entry.key.raw: to_data(entry.value) for entry in node.entries}


def format_path(path: Path) -> str:
    """Return a path as in `cluster.node_groups[0].label`, the form of overrides, which `parse_path` reads."""
    text = ""
    for segment in path:
        if isinstance(segment, int):
            text += f"[{segment}]"
        else:
            name = _quoted(segment) if _needs_quotes(segment) else segment
            text += f".{name}" if text else name
    return text


def _needs_quotes(name: str) -> bool:
    return not name or name[0] in "~+" or any(c in ".,[]{}=\"'\\" or c.isspace() for c in name)


def _quoted(name: str) -> str:
    for character, escape in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        name = name.replace(character, escape)
    return f'"{name}"'


_NULLS: Final = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLS: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# A scalar with another first character is text, which avoids the regular expressions for most scalars.
_NUMBER_STARTS: Final = frozenset("0123456789+-.")
_DECIMAL: Final = re.compile(r"[-+]?[0-9]+", re.ASCII)
_OCTAL: Final = re.compile(r"0o[0-7]+", re.ASCII)
_HEXADECIMAL: Final = re.compile(r"0x[0-9a-fA-F]+", re.ASCII)
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_INFINITY: Final = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NANS: Final = frozenset((".nan", ".NaN", ".NAN"))
# Python limits the conversion of long integers to text (sys.set_int_max_str_digits); no real setting is that long.
_LONGEST_INTEGER: Final = 1000


def resolve_plain(raw: str) -> bool | int | float | str | None:
    """Return the value of an unquoted scalar in the core schema of YAML 1.2 (chapter 10.3).

    `on`, `yes`, `1_000`, `0b11`, `1:2` and `2024-01-01` are text, and `010` is ten. An integer of more than 1000 digits
    stays text.
    """
    if raw in _NULLS:
        return None
    if raw[0] not in _NUMBER_STARTS:
        return _BOOLS.get(raw, raw)
    if _DECIMAL.fullmatch(raw):
        return int(raw) if len(raw) <= _LONGEST_INTEGER else raw
    if _FLOAT.fullmatch(raw):
        return float(raw)
    if len(raw) <= _LONGEST_INTEGER:
        if _OCTAL.fullmatch(raw):
            return int(raw[2:], 8)
        if _HEXADECIMAL.fullmatch(raw):
            return int(raw[2:], 16)
    if _INFINITY.fullmatch(raw):
        return float("-inf") if raw[0] == "-" else float("inf")
    return float("nan") if raw in _NANS else raw


def place(tree: MappingNode, path: Path) -> Span:
    """Return the span to underline for the value at `path`, or for its nearest existing parent."""
    node = find(tree, path)
    if isinstance(node, ScalarNode) and node.span.end > node.span.start:
        return node.span
    return naming(tree, path)


def naming(tree: MappingNode, path: Path) -> Span:
    """Return the span of the key of the value at `path`, or of a list item's first line; else of a parent or the start
    of the file."""
    while path:
        key = key_span(tree, path)
        if key is not None:
            return key
        node = find(tree, path)
        if node is not None:
            return first_line(node)
        path = path[:-1]
    return Span(tree.span.source, 0, 0)


def first_line(node: Node) -> Span:
    """Return the node's first line, without trailing blanks or a comment after its first entry."""
    span = node.span
    text = span.source.text
    if not text.startswith(("[", "{"), span.start):
        span = _without_comment(node)
    newline = text.find("\n", span.start, span.end)
    end = newline if newline >= 0 else span.end
    while end > span.start + 1 and text[end - 1].isspace():
        end -= 1
    return Span(span.source, span.start, end)


def _without_comment(node: Node) -> Span:
    """Return the span of a block collection up to the end of its first entry, since its own end is after comments.

    Parts of a composed node from other sources are ignored.
    """
    span = node.span
    if isinstance(node, MappingNode) and node.entries and _within(span, node.entries[0].key.span):
        key, value = node.entries[0].key.span, node.entries[0].value
        same = isinstance(value, ScalarNode) and _within(span, value.span) and value.span.end > key.end
        return Span(span.source, span.start, value.span.end if same else key.end)
    if isinstance(node, SequenceNode) and node.items and _within(span, node.items[0].span):
        return Span(span.source, span.start, max(span.start, first_line(node.items[0]).end))
    return span


def _within(outer: Span, inner: Span) -> bool:
    return inner.source is outer.source and outer.start <= inner.start <= outer.end


def part(node: Node | None, start: int, end: int) -> Span | None:
    """Return the span of a part of a scalar's raw text; None if escapes or folding change it in the source."""
    if not isinstance(node, ScalarNode):
        return None
    written = node.span.text
    for shift in (0, 1):
        if written[shift : shift + len(node.raw)] == node.raw and len(written) == len(node.raw) + 2 * shift:
            return node.span.part(shift + start, shift + max(end, start + 1))
    return None


class NamePiece(NamedTuple):
    """One of several names in a text, stripped; `start` and `end` are its offsets in the whole text."""

    name: str
    start: int
    end: int


def name_pieces(text: str, separator: str = ",", at: int = 0) -> list[NamePiece]:
    """Return the possibly empty pieces of a text between separators. `at` is the offset of `text` itself."""
    pieces: list[NamePiece] = []
    for piece in text.split(separator):
        name = piece.strip()
        start = at + len(piece) - len(piece.lstrip()) if name else at + len(piece)
        pieces.append(NamePiece(name, start, start + len(name)))
        at += len(piece) + 1
    return pieces


class Composed(NamedTuple):
    """A composed configuration.

    Attributes:
        tree: the effective values; their spans give the source of each.
        sources: the file, its bases, and the overrides, if any.
        unresolved: paths of values that could not be read or whose references failed, both reported: not checked.
        secret: paths whose value came through a reference from a secret-looking variable or key (see `secrets.py`).
        referred: paths that references name.
    """

    tree: MappingNode
    sources: tuple[SourceText, ...] = ()
    unresolved: frozenset[Path] = frozenset()
    secret: frozenset[Path] = frozenset()
    referred: frozenset[Path] = frozenset()

    def moved(self, tree: MappingNode, new: Callable[[Path], Path]) -> Composed:
        """Return the configuration with another tree, in which values have moved to new paths."""
        paths = (frozenset(map(new, paths)) for paths in (self.unresolved, self.secret, self.referred))
        return Composed(tree, self.sources, *paths)
