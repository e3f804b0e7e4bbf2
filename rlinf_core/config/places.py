"""Spans to underline for findings about a path.

A scalar is underlined itself, a mapping or a list at its key or first line, the whole file at its start.
"""

from __future__ import annotations

from rlinf_core.config.source import Span
from rlinf_core.config.tree import MappingNode, Node, Path, ScalarNode, SequenceNode, find, key_span


def place(tree: MappingNode, path: Path) -> Span:
    """Return the span to underline for the value at `path`, or for its nearest existing parent."""
    node = find(tree, path)
    if isinstance(node, ScalarNode) and node.span.end > node.span.start:
        return node.span
    return naming(tree, path)


def naming(tree: MappingNode, path: Path) -> Span:
    """Return the key that names the value at `path`, the first line of a list item, or the start of the file."""
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
    """Return the span of a block collection up to the end of its first entry: its own end is after comments.

    Composed nodes may have parts from other sources, which say nothing about this line.
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
