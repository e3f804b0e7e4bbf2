"""Comments of a YAML file, located by the values they belong to."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Final, NamedTuple

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import read
from rlinf_core.config.source import SourceText, Span
from rlinf_core.config.tree import Entry, MappingNode, Node, ScalarNode

_BEHIND: Final = re.compile(r"[\s,]+(#.*)$")
_BEHIND_KEY: Final = re.compile(r"[\"']?\s*:(?:\s+[&!]\S+)*\s+(#.*)$")
# Directives for Hydra, which are dropped.
_HYDRA: Final = re.compile(r"#\s*@package\b")


class Comments(NamedTuple):
    """The comments of one value: whole lines above it, and the one after it; each with its `#`."""

    above: tuple[str, ...] = ()
    behind: str = ""


NO_COMMENTS: Final = Comments()


class CommentFinder:
    """The comments of a source."""

    def __init__(self, source: SourceText) -> None:
        self.source = source
        self._lines = source.text.splitlines()

    @cached_property
    def header(self) -> tuple[str, ...]:
        """The comments at the beginning of the source."""
        numbered = enumerate(self._lines, 1)
        first = next((number for number, line in numbered if line.strip() and not line.lstrip().startswith("#")), 1)
        return tuple(line for line in self._above_line(first) if not line.startswith("#!"))

    def of_entry(self, entry: Entry) -> Comments:
        """Return the comments of a key and its value."""
        span = entry.key.span
        if span.source is not self.source:
            return NO_COMMENTS
        value = entry.value
        on_line = isinstance(value, ScalarNode) or value.span.text.startswith(("[", "{"))
        if on_line and value.span.source is span.source and value.span.start > span.start:
            behind = _behind(value.span, _BEHIND)
        else:
            behind = _behind(span, _BEHIND_KEY)
        return Comments(self._above(span), behind)

    def of_item(self, node: Node) -> Comments:
        """Return the comments of an item of a list; those of a mapping belong to its keys."""
        if not isinstance(node, ScalarNode) or node.span.source is not self.source:
            return NO_COMMENTS
        return Comments(self._above(node.span), _behind(node.span, _BEHIND))

    def at_end(self) -> tuple[str, ...]:
        """Return the comments after the last value."""
        return self._above_line(len(self._lines) + 1)

    def _above(self, span: Span) -> tuple[str, ...]:
        line = span.begin.line
        # In braces or after a dash, the comments above belong to the first value of the line.
        before = span.source.line(line)[: span.begin.column - 1].strip()
        return self._above_line(line) if before in ("", "-", "?", "- -") else ()

    def _above_line(self, number: int) -> tuple[str, ...]:
        """Return the comments between a line and the content before it, across blank lines."""
        block: list[str] = []
        number -= 1
        while number >= 1 and (
            number in self._comments or not self._lines[number - 1].strip() or _is_hydra(self._lines[number - 1])
        ):
            if number in self._comments:
                block.append(self._comments[number])
            number -= 1
        return tuple(reversed(block))

    @cached_property
    def _comments(self) -> dict[int, str]:
        """The lines that are comments by their numbers, without those inside texts of several lines."""
        text_lines: set[int] = set()
        tree = read(self.source, Diagnostics())
        if tree is not None:
            _mark(tree, text_lines)
        comments_by_line: dict[int, str] = {}
        for number, line in enumerate(self._lines, 1):
            stripped = line.strip()
            if stripped.startswith("#") and number not in text_lines and not _HYDRA.match(stripped):
                comments_by_line[number] = stripped
        return comments_by_line


def _is_hydra(line: str) -> bool:
    return _HYDRA.match(line.strip()) is not None


def _behind(span: Span, pattern: re.Pattern[str]) -> str:
    finish = span.finish
    rest = span.source.line(finish.line)[finish.column - 1 :]
    match = pattern.match(rest)
    return match[1].rstrip() if match else ""


def _mark(node: Node, text_lines: set[int]) -> None:
    """Add the lines of scalars to `taken`: a `#` there is text."""
    if isinstance(node, ScalarNode):
        text_lines.update(range(node.span.begin.line, node.span.finish.line + (node.span.finish.column > 1)))
    elif isinstance(node, MappingNode):
        for entry in node.entries:
            _mark(entry.key, text_lines)
            _mark(entry.value, text_lines)
    else:
        for item in node.items:
            _mark(item, text_lines)
