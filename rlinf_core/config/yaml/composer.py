"""Composition of a tree with positions from the parser's events.

Only the nodes of `tree.py` are constructed. The parser's own composer raises at the first unknown alias, loses the
position of aliases, and accepts duplicate keys. Aliases become shared nodes, and are counted as if copied, which is
their later cost.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, cast

from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
)

from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.source import Span
from rlinf_core.config.tree import Entry, MappingNode, Node, ScalarNode, SequenceNode
from rlinf_core.config.yaml.yaml_layout import Indentation
from rlinf_core.config.yaml.yaml_scanner import parse_events
from rlinf_core.config.yaml.yaml_types import find_properties, resolve_plain, tag_help, tagged_value
from rlinf_core.suggest import did_you_mean, excerpt

_MERGE = "<<"
_BLANKS = " \t\r\n"
_LONGEST_NAME = 60
_MOST_SUGGESTIONS = 20
_SURROGATE = re.compile("[\ud800-\udfff]")


class Limits(NamedTuple):
    """Limits on the size of a text, far above any real configuration and low enough to stay fast.

    Attributes:
        nodes: values (keys do not count) after expanding every alias.
        depth: nesting depth of mappings and lists.
    """

    file_bytes: int = 8 * 1024 * 1024
    nodes: int = 500_000
    depth: int = 100


class LimitError(Exception):
    """A limit was exceeded and reported; there is no tree."""


class _Anchored(NamedTuple):
    """A finished node with an anchor: its number of values, and its depth (0 for a scalar)."""

    node: Node
    size: int
    height: int


class Composer:
    """The composition of one text; `findings` are its mistakes other than syntax errors."""

    def __init__(self, layout: Indentation, limits: Limits) -> None:
        self.findings: list[Diagnostic] = []
        self._layout = layout
        self._text = layout.text
        self._limits = limits
        self._events = parse_events(layout.text)
        # None stands for an anchor whose node is still open.
        self._anchors: dict[str, _Anchored | None] = {}
        self._nodes = 0
        self._depth = self._deepest = 0
        self._path: list[str | int] = []

    def compose(self) -> Node | None:
        """Return the tree of the only document; None for a text without content.

        Raises:
            YamlSyntaxError: the text is not YAML.
            LimitError: a limit was exceeded; `findings` says which.
        """
        root: Node | None = None
        for event in self._events:
            if type(event) is DocumentStartEvent:
                if root is not None:
                    self._report_second_document(event)
                    break
                root = self._node(next(self._events))[0]
        return root

    def _node(self, event: Any, key_end: int | None = None, *, is_key: bool = False) -> tuple[Node, int]:
        """Return the node that starts with `event`, and the end of its notation in the source.

        `key_end` is the end of the key of a mapping's value: the position of an empty value.
        """
        start: int = event.start_mark.index
        end: int = min(event.end_mark.index, len(self._text))
        if type(event) is AliasEvent:
            return self._alias(cast("Any", event).anchor, self._layout.span(start, end), is_key)
        is_scalar = type(event) is ScalarEvent
        tag_span: Span | None = None
        if event.anchor is not None or event.ctag is not None:
            limit = end if is_scalar else len(self._text)
            has = (event.anchor is not None, event.ctag is not None)
            tag_at, start = find_properties(self._text, start, limit, *has)
            tag_span = self._layout.span(*tag_at) if tag_at else None
        if event.anchor is None:
            if is_scalar:
                return self._scalar(event, start, end, tag_span, key_end, is_key)
            return self._collection(event, start, tag_span)
        anchor: str = event.anchor
        size, deepest, self._deepest = self._nodes, self._deepest, self._depth
        self._anchors[anchor] = None
        if is_scalar:
            node, node_end = self._scalar(event, start, end, tag_span, key_end, is_key)
        else:
            node, node_end = self._collection(event, start, tag_span)
        if self._anchors[anchor] is None:  # else a nested node has taken the name
            self._anchors[anchor] = _Anchored(node, max(1, self._nodes - size), self._deepest - self._depth)
        self._deepest = max(deepest, self._deepest)
        return node, node_end

    def _scalar(
        self, event: Any, start: int, end: int, tag_span: Span | None, key_end: int | None, is_key: bool
    ) -> tuple[Node, int]:
        raw: str = event.value
        style: str | None = event.style
        plain = style is None
        if plain and not raw:
            start = end = end if event.anchor is None and event.ctag is None else start
        elif style in ("|", ">"):
            end = start + len(self._text[start:end].rstrip(_BLANKS))
        span = self._layout.span(start, end)
        if plain and not raw and key_end is not None:
            span = Span(span.source, key_end, key_end)
        if style == '"' and _SURROGATE.search(raw):
            raw = self._whole_characters(raw, span)
        if event.ctag is not None:
            value, plain = self._tagged(event.tag, raw, "scalar", tag_span or span, span)
        else:
            value = resolve_plain(raw) if plain else raw
        if not is_key:
            self._count(1, span)
        return ScalarNode(span, raw, value, plain), span.end

    def _collection(self, event: Any, start: int, tag_span: Span | None) -> tuple[Node, int]:
        text, is_mapping = self._text, type(event) is MappingStartEvent
        first_line = self._layout.span(start, _line_end(text, start))
        if event.ctag is not None:
            self._tagged(event.tag, "", "map" if is_mapping else "seq", tag_span or first_line, first_line)
        if self._depth >= self._limits.depth:
            self._too_deep(self._layout.span(start, start + 1))
        self._count(1, first_line)
        self._depth += 1
        self._deepest = max(self._deepest, self._depth)
        bracketed = bool(event.flow_style) and text[start : start + 1] in ("{", "[")
        node = self._mapping(first_line.start, bracketed) if is_mapping else self._sequence(first_line.start, bracketed)
        self._depth -= 1
        return node, node.span.end

    def _span_to(self, event: Any, start: int, end: int, bracketed: bool) -> Span:
        # A block collection's own end mark is after the comments that follow it.
        end = self._layout.span(0, event.end_mark.index).end if bracketed else end
        return Span(self._layout.source, start, end)

    def _sequence(self, start: int, bracketed: bool) -> SequenceNode:
        items: list[Node] = []
        end = start
        while type(event := next(self._events)) is not SequenceEndEvent:
            self._path.append(len(items))
            node, node_end = self._node(event)
            self._path.pop()
            items.append(node)
            end = max(end, node_end)
        return SequenceNode(self._span_to(event, start, end, bracketed), tuple(items))

    def _mapping(self, start: int, bracketed: bool) -> MappingNode:
        entries: dict[str, Entry] = {}
        merge: _Merge | None = None
        end = start
        while type(event := next(self._events)) is not MappingEndEvent:
            key_node, key_end = self._node(event, is_key=True)
            key = self._key(key_node)
            if key is not None:
                self._path.append(key.raw)
            value, value_end = self._node(next(self._events), key_end)
            if key is not None:
                first = entries.get(key.raw)
                is_merge = key.raw == _MERGE and key.plain
                if is_merge and merge is not None:
                    first = Entry(merge.key, value)
                if first is not None:
                    self._report_duplicate(key, first.key)
                self._path.pop()
                if first is None and is_merge:
                    merge = _Merge(key, len(entries), self._merge_sources(value))
                elif first is None:
                    entries[key.raw] = Entry(key, value)
            end = max(end, key_end, value_end)
        span = self._span_to(event, start, end, bracketed)
        return MappingNode(span, _with_merged(entries, merge) if merge else tuple(entries.values()))

    def _alias(self, name: str, span: Span, is_key: bool) -> tuple[Node, int]:
        anchored = self._anchors.get(name)
        if anchored is None:
            if name in self._anchors:
                message = f"`*{excerpt(name)}` is inside the value that it names"
                self._error("recursive-alias", message, span)
            else:
                message = f"`*{excerpt(name)}` names no earlier anchor"
                help = self._similar_anchor(name) or "quote the value if it is meant to start with `*`"
                self._error("undefined-alias", message, span, help)
            return ScalarNode(span, f"*{name}", None), span.end
        if self._depth + anchored.height > self._limits.depth:
            self._too_deep(span)
        self._deepest = max(self._deepest, self._depth + anchored.height)
        self._count(anchored.size, span)
        node = anchored.node
        if is_key and isinstance(node, ScalarNode):
            node = ScalarNode(span, node.raw, node.value, node.plain)
        return node, span.end

    def _similar_anchor(self, name: str) -> str | None:
        # The search for similar names must not dominate in a file full of mistakes or huge names.
        if len(name) > _LONGEST_NAME or len(self.findings) > _MOST_SUGGESTIONS:
            return None
        return did_you_mean(name, (anchor for anchor in self._anchors if len(anchor) <= _LONGEST_NAME))

    def _key(self, node: Node) -> ScalarNode | None:
        if isinstance(node, ScalarNode):
            if node.value is not None:
                return node
            if not node.raw.startswith("*"):  # else an alias that has been reported
                what = f"a key is `{node.raw}`, which means null" if node.raw else "a key is missing before `:`"
                self._error("null-key", what, node.span, "write a name, in quotes if need be")
            return None
        span = node.span
        template = span.text.startswith("{") and span.source.text[span.start - 1 : span.start] == "{"
        self._error(
            "complex-key",
            f"a {'mapping' if isinstance(node, MappingNode) else 'list'} is in the place of a key",
            span.part(0, len(span.text.partition("\n")[0].rstrip())),
            "quote the whole value if `{{ ... }}` is meant as text" if template else "a key is a name or a number",
        )
        return None

    def _merge_sources(self, value: Node) -> list[MappingNode]:
        candidates = value.items if isinstance(value, SequenceNode) else (value,)
        for node in candidates:
            if not isinstance(node, MappingNode) and not (
                isinstance(node, ScalarNode) and node.raw.startswith("*") and node.plain
            ):
                message = "`<<` takes a mapping or a list of mappings, as in `<<: *name`"
                self._error("bad-merge", message, node.span, "quote the key if it is meant to be the text `<<`")
        return [node for node in candidates if isinstance(node, MappingNode)]

    def _tagged(self, tag: str, raw: str, kind: str, tag_span: Span, span: Span) -> tuple[Any, bool]:
        """Return the value of a tagged node and whether it was resolved; report a tag that does not fit."""
        verdict, value, plain = tagged_value(tag, raw, kind)
        if verdict == "unknown":
            message = f"the tag `{excerpt(tag_span.text)}` is unknown; only plain data are read"
            self._error("unknown-tag", message, tag_span, tag_help(tag_span.text))
        elif verdict == "mismatch":
            what = {"map": "a mapping", "seq": "a list"}.get(kind, f"`{excerpt(raw)}`")
            message = f"the tag `{excerpt(tag_span.text)}` does not fit {what}"
            self._error("tag-mismatch", message, tag_span, "remove the tag", ((span, "the value"),))
        return value, plain

    def _whole_characters(self, raw: str, span: Span) -> str:
        r"""Return `raw` with the halves of `"\ud83d\ude00"`, as JSON writes it, joined; a half alone is an error."""
        joined = raw.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if joined.count("\ufffd") > raw.count("\ufffd"):
            message = "an escape in this text is half a character"
            help = "write the character itself, or its full escape such as `\\U0001F600`"
            self._error("lone-surrogate", message, span, help)
        return joined

    # Limits and reports

    def _count(self, nodes: int, span: Span) -> None:
        self._nodes += nodes
        if self._nodes > self._limits.nodes:
            by_alias = "after expanding aliases, " if nodes > 1 else ""
            message = f"{by_alias}there are more than {self._limits.nodes} values here"
            self._error("too-many-nodes", message, span, "write large data to a separate file and set its path")
            raise LimitError

    def _too_deep(self, span: Span) -> None:
        self._error("too-deep", f"mappings and lists are nested more than {self._limits.depth} deep", span)
        raise LimitError

    def _report_second_document(self, event: Any) -> None:
        start, end = event.start_mark.index, event.end_mark.index
        if start == end:
            end = _line_end(self._text, start)
        message = "a second document starts here; a configuration is one document"
        help = "keep one document per file; `extends: FILE` builds on another file"
        self._error("several-documents", message, self._layout.span(start, end), help)

    def _report_duplicate(self, key: ScalarNode, first: ScalarNode) -> None:
        message = f"key `{excerpt(key.raw)}` appears twice in the same mapping"
        self._error("duplicate-key", message, key.span, "keep one of the two", ((first.span, "first written here"),))

    def _error(
        self, code: str, message: str, span: Span, help: str | None = None, related: tuple[tuple[Span, str], ...] = ()
    ) -> None:
        self.findings.append(Diagnostic(code, Severity.ERROR, message, span, tuple(self._path), help, related))


class _Merge(NamedTuple):
    """The `<<` of a mapping: its key, the number of entries before it, and the mappings that it names."""

    key: ScalarNode
    place: int
    sources: list[MappingNode]


def _with_merged(entries: dict[str, Entry], merge: _Merge) -> tuple[Entry, ...]:
    """Return the entries of a mapping with `<<` expanded in place: own keys win, then the mapping named first."""
    merged: dict[str, Entry] = {}
    for source in merge.sources:
        for entry in source.entries:
            if entry.key.raw not in entries:
                merged.setdefault(entry.key.raw, entry)
    own = tuple(entries.values())
    return (*own[: merge.place], *merged.values(), *own[merge.place :])


def _line_end(text: str, at: int) -> int:
    """Return the offset where the visible part of the line around `at` ends, `at` at least."""
    end = text.find("\n", at)
    end = len(text) if end < 0 else end
    return at + len(text[at:end].rstrip(_BLANKS))
