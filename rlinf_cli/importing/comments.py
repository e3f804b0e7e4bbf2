"""Comments of YAML files, located by the values they belong to."""

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


class _Lines:
    """The comment-only lines of a source."""

    def __init__(self, source: SourceText) -> None:
        self.source = source

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the source."""
        return self.source.text.splitlines()

    @cached_property
    def comments(self) -> dict[int, str]:
        """Return comments by line number, without those inside multi-line texts."""
        text_lines: set[int] = set()
        tree = read(self.source, Diagnostics())
        if tree is not None:
            _mark(tree, text_lines)
        comments_by_line: dict[int, str] = {}
        for number, line in enumerate(self.lines, 1):
            stripped = line.strip()
            if stripped.startswith("#") and number not in text_lines and not _HYDRA.match(stripped):
                comments_by_line[number] = stripped
        return comments_by_line

    def above(self, number: int) -> tuple[str, ...]:
        """Return the comments between a line and the content before it, across blank lines."""
        lines = self.lines
        block: list[str] = []
        number -= 1
        while number >= 1 and (
            number in self.comments or not lines[number - 1].strip() or _is_hydra(lines[number - 1])
        ):
            if number in self.comments:
                block.append(self.comments[number])
            number -= 1
        return tuple(reversed(block))


class CommentFinder:
    """The comments of several sources."""

    def __init__(self) -> None:
        self._lines: dict[int, _Lines] = {}

    def of_entry(self, entry: Entry) -> Comments:
        """Return the comments of a key and its value."""
        span = entry.key.span
        if not span.source.text:
            return Comments()
        value = entry.value
        on_line = isinstance(value, ScalarNode) or value.span.text.startswith(("[", "{"))
        if on_line and value.span.source is span.source and value.span.start > span.start:
            behind = _behind(value.span, _BEHIND)
        else:
            behind = _behind(span, _BEHIND_KEY)
        return Comments(self._above(span), behind)

    def of_item(self, node: Node) -> Comments:
        """Return the comments of an item of a list; those of a mapping belong to its keys."""
        if not isinstance(node, ScalarNode) or not node.span.source.text:
            return Comments()
        return Comments(self._above(node.span), _behind(node.span, _BEHIND))

    def at_end(self, source: SourceText) -> tuple[str, ...]:
        """Return the comments after the last value of a source."""
        return self._of(source).above(len(source.text.splitlines()) + 1)

    def _above(self, span: Span) -> tuple[str, ...]:
        line = span.begin.line
        # In braces or after a dash, the comments above belong to the first value of the line.
        before = span.source.line(line)[: span.begin.column - 1].strip()
        return self._of(span.source).above(line) if before in ("", "-", "?", "- -") else ()

    def _of(self, source: SourceText) -> _Lines:
        return self._lines.setdefault(id(source), _Lines(source))


def header_of(source: SourceText) -> tuple[str, ...]:
    """Return the comments at the beginning of a source."""
    lines = source.text.splitlines()
    first = next(
        (number for number, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")), 1
    )
    return tuple(line for line in _Lines(source).above(first) if not line.startswith("#!"))


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
