"""Construction of a tree with positions from the parser's events.

Nothing is constructed but the nodes of `tree.py`, and nothing recurses. The parser's own composer does, and raises at
the first unknown alias or second document, where other mistakes are still to be found. Aliases become the nodes they
name, shared, and are counted as if they were copied, for that is what they cost later.
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
    SequenceStartEvent,
)

from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.source import Span
from rlinf_core.config.tree import (
    Anchored,
    Entry,
    MappingNode,
    Node,
    OpenNode,
    Path,
    ScalarNode,
    SequenceNode,
    with_merged,
)
from rlinf_core.config.yaml_hints import shown
from rlinf_core.config.yaml_layout import Indentation
from rlinf_core.config.yaml_types import (
    Verdict,
    collection_tag,
    find_properties,
    resolve_plain,
    tag_help,
    tagged_scalar,
)
from rlinf_core.suggest import did_you_mean

_MERGE = "<<"
_BLANKS = " \t\r\n"
_LONGEST_NAME = 60
_MOST_SUGGESTIONS = 20
_SURROGATE = re.compile("[\ud800-\udfff]")


class Limits(NamedTuple):
    """Limits on the size of a text, far above any real configuration and low enough to stay quick.

    Attributes:
        nodes: values (keys do not count) after every alias has been replaced by what it stands for.
        depth: mappings and lists within each other.
    """

    file_bytes: int = 8 * 1024 * 1024
    nodes: int = 500_000
    depth: int = 100


class LimitError(Exception):
    """A limit was exceeded, which has been reported; there is no tree."""


class TreeBuilder:
    """A consumer of events; `root` is the tree once they have ended, None for a text without content."""

    def __init__(self, layout: Indentation, limits: Limits) -> None:
        self.root: Node | None = None
        self.found: list[Diagnostic] = []
        self._layout = layout
        self._text = layout.text
        self._limits = limits
        self._frames: list[OpenNode] = []
        # None stands for an anchor whose node is still open.
        self._anchors: dict[str, Anchored | None] = {}
        self._nodes = 0
        self._documents = 0

    def feed(self, event: Any) -> bool:
        """Take one event; False when the rest of the stream does not matter.

        Raises:
            LimitError: when a limit is passed; `found` tells which.
        """
        kind = cast("type[object]", type(event))
        if kind is ScalarEvent:
            self._scalar(event)
        elif kind is MappingStartEvent or kind is SequenceStartEvent:
            self._open(event, kind is MappingStartEvent)
        elif kind is MappingEndEvent or kind is SequenceEndEvent:
            self._close(event.end_mark.index)
        elif kind is AliasEvent:
            self._alias(event.anchor, event.start_mark.index, event.end_mark.index)
        elif kind is DocumentStartEvent:
            return self._document(event)
        return True

    # Events

    def _document(self, event: Any) -> bool:
        self._documents += 1
        start: int = event.start_mark.index
        end: int = event.end_mark.index
        if self._documents > 1:
            if end == start:
                end = _line_end(self._text, start)
            self._error(
                "several-documents",
                "a second document starts here; a configuration is one document",
                self._layout.span(start, end),
                help="keep one document per file; `extends: FILE` builds on another file",
            )
            return False
        return True

    def _scalar(self, event: Any) -> None:
        start: int = event.start_mark.index
        end: int = event.end_mark.index
        raw: str = event.value
        style: str | None = event.style
        tag_span: Span | None = None
        has_properties = event.anchor is not None or event.ctag is not None
        if has_properties:
            tag_span, start = self._properties(event, start, end)
        if style is None:
            if not raw:
                start = end = self._empty_at(start if has_properties else end)
        elif style == '"':
            raw = self._whole_characters(raw, start, end)
        elif style in "|>":
            end = start + len(self._text[start:end].rstrip(_BLANKS))
        span = self._layout.span(start, end)
        if event.ctag is not None:
            node = self._tagged_scalar(event.tag, tag_span or span, span, raw)
        elif style is None:
            node = ScalarNode(span, raw, resolve_plain(raw))
        else:
            node = ScalarNode(span, raw, raw, plain=False)
        if not self._expects_key():
            self._count(1, span)
        if event.anchor is not None:
            self._anchors[event.anchor] = Anchored(node, 1, 0)
        self._attach(node, 1, 0, start, end)

    def _open(self, event: Any, is_mapping: bool) -> None:
        start: int = event.start_mark.index
        tag_span: Span | None = None
        if event.anchor is not None or event.ctag is not None:
            tag_span, start = self._properties(event, start, len(self._text))
        first_line = self._layout.span(start, _line_end(self._text, start))
        if event.ctag is not None:
            verdict = collection_tag(event.tag, is_mapping=is_mapping)
            self._report_tag(verdict, tag_span or first_line, "a mapping" if is_mapping else "a list", first_line)
        if len(self._frames) >= self._limits.depth:
            self._too_deep(self._layout.span(start, start + 1))
        self._count(1, first_line)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        bracketed = bool(event.flow_style) and self._text[start : start + 1] in ("{", "[")
        self._frames.append(OpenNode(is_mapping, start, start, bracketed, event.anchor))

    def _close(self, end: int) -> None:
        frame = self._frames.pop()
        # A block collection's own end mark lies behind the comments that follow it.
        end = end if frame.bracketed else frame.end
        span = self._layout.span(frame.start, end)
        node = MappingNode(span, with_merged(frame)) if frame.is_mapping else SequenceNode(span, tuple(frame.items))
        if frame.anchor is not None and self._anchors.get(frame.anchor) is None:
            self._anchors[frame.anchor] = Anchored(node, frame.size, frame.height)
        self._attach(node, frame.size, frame.height, frame.start, end)

    def _alias(self, name: str, start: int, end: int) -> None:
        span = self._layout.span(start, end)
        anchored = self._anchors.get(name)
        if anchored is None:
            if name in self._anchors:
                message = f"`*{shown(name)}` stands inside the value that it names"
                self._error("recursive-alias", message, span)
            else:
                self._error(
                    "undefined-alias",
                    f"`*{shown(name)}` names no anchor that stands before it",
                    span,
                    help=self._similar_anchor(name) or "quote the value if it is meant to start with `*`",
                )
            self._attach(ScalarNode(span, f"*{name}", None), 1, 0, start, end)
            return
        if len(self._frames) + anchored.height > self._limits.depth:
            self._too_deep(span)
        self._count(anchored.size, span)
        node = anchored.node
        if self._expects_key() and isinstance(node, ScalarNode):
            node = ScalarNode(span, node.raw, node.value, node.plain)
        self._attach(node, anchored.size, anchored.height, start, end)

    def _similar_anchor(self, name: str) -> str | None:
        # A file full of slips or of huge names must not make the search for similar ones the longest part.
        if len(name) > _LONGEST_NAME or len(self.found) > _MOST_SUGGESTIONS:
            return None
        return did_you_mean(name, (anchor for anchor in self._anchors if len(anchor) <= _LONGEST_NAME))

    # Putting nodes in their place

    def _attach(self, node: Node, size: int, height: int, start: int, end: int) -> None:
        if not self._frames:
            self.root = node
            return
        frame = self._frames[-1]
        frame.end = max(frame.end, end)
        if frame.is_mapping and not frame.awaits_value:
            frame.awaits_value = True
            frame.key_end = end
            frame.key = self._key(node, start, end)
            return
        frame.size += size
        frame.height = max(frame.height, height + 1)
        if frame.is_mapping:
            frame.awaits_value = False
            self._entry(frame, node)
        else:
            frame.items.append(node)

    def _expects_key(self) -> bool:
        return bool(self._frames) and self._frames[-1].is_mapping and not self._frames[-1].awaits_value

    def _key(self, node: Node, start: int, end: int) -> ScalarNode | None:
        if isinstance(node, ScalarNode):
            if node.value is not None:
                return node
            if not node.raw.startswith("*"):  # else an alias that has been reported
                what = f"a key is `{node.raw}`, which means null" if node.raw else "a key is missing before `:`"
                self._error("null-key", what, node.span, help="write a name, in quotes if need be")
            return None
        template = self._text[start:end].startswith("{") and self._text[start - 1 : start] == "{"
        kind = "mapping" if isinstance(node, MappingNode) else "list"
        self._error(
            "complex-key",
            f"a {kind} stands where a key is expected",
            self._layout.span(start, min(end, _line_end(self._text, start))),
            help="quote the whole value if `{{ ... }}` is meant as text" if template else "a key is a name or a number",
        )
        return None

    def _entry(self, frame: OpenNode, value: Node) -> None:
        key = frame.key
        frame.key = None
        if key is None:
            return
        first = frame.entries.get(key.raw)
        is_merge = key.raw == _MERGE and key.plain
        if is_merge and frame.merge_key is not None:
            first = Entry(frame.merge_key, value)
        if first is not None:
            self._error(
                "duplicate-key",
                f"key `{shown(key.raw)}` appears twice in the same mapping",
                key.span,
                path=(*self._path(), key.raw),
                help="keep one of the two",
                related=((first.key.span, "first written here"),),
            )
        elif is_merge:
            frame.merge_key = key
            frame.merge_index = len(frame.entries)
            frame.merged = self._merge_sources(value)
        else:
            frame.entries[key.raw] = Entry(key, value)

    def _merge_sources(self, value: Node) -> list[MappingNode]:
        candidates = value.items if isinstance(value, SequenceNode) else (value,)
        sources: list[MappingNode] = []
        for candidate in candidates:
            if isinstance(candidate, MappingNode):
                sources.append(candidate)
            elif not (isinstance(candidate, ScalarNode) and candidate.raw.startswith("*") and candidate.plain):
                self._error(
                    "bad-merge",
                    "`<<` takes a mapping or a list of mappings, as in `<<: *name`",
                    candidate.span,
                    help="quote the key if it is meant to be the text `<<`",
                )
        return sources

    def _empty_at(self, at: int) -> int:
        """Return the offset of an empty value: the end of its key, else where the parser puts it."""
        frame = self._frames[-1] if self._frames else None
        return frame.key_end if frame and frame.is_mapping and frame.awaits_value else at

    # Tags, anchors, escapes

    def _properties(self, event: Any, start: int, end: int) -> tuple[Span | None, int]:
        """Return the tag before a node's content, and where the content starts."""
        has_anchor, has_tag = event.anchor is not None, event.ctag is not None
        tag, content = find_properties(self._text, start, end, has_anchor=has_anchor, has_tag=has_tag)
        return (self._layout.span(*tag) if tag else None), content

    def _tagged_scalar(self, tag: str, tag_span: Span, span: Span, raw: str) -> ScalarNode:
        verdict, value, plain = tagged_scalar(tag, raw)
        self._report_tag(verdict, tag_span, f"`{shown(raw)}`", span)
        return ScalarNode(span, raw, value, plain)

    def _report_tag(self, verdict: Verdict, tag_span: Span, what: str, span: Span) -> None:
        if verdict == "unknown":
            self._error(
                "unknown-tag",
                f"the tag `{shown(tag_span.text)}` is not known; only plain data is read",
                tag_span,
                help=tag_help(tag_span.text),
            )
        elif verdict == "mismatch":
            self._error(
                "tag-mismatch",
                f"the tag `{shown(tag_span.text)}` does not fit {what}",
                tag_span,
                help="remove the tag",
                related=((span, "the value"),),
            )

    def _whole_characters(self, raw: str, start: int, end: int) -> str:
        r"""Return `raw` with the halves of `"\ud83d\ude00"`, as JSON writes it, joined; a half alone is an error."""
        if not _SURROGATE.search(raw):
            return raw
        joined = raw.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if joined.count("\ufffd") > raw.count("\ufffd"):
            self._error(
                "lone-surrogate",
                "an escape in this text stands for half a character",
                self._layout.span(start, end),
                help="write the character itself, or its full escape such as `\\U0001F600`",
            )
        return joined

    # Limits and reports

    def _count(self, nodes: int, span: Span) -> None:
        self._nodes += nodes
        if self._nodes > self._limits.nodes:
            by_alias = "once aliases are replaced by what they stand for, " if nodes > 1 else ""
            self._error(
                "too-many-nodes",
                f"{by_alias}there are more than {self._limits.nodes} values here",
                span,
                help="write large data to a file of its own and give its path",
            )
            raise LimitError

    def _too_deep(self, span: Span) -> None:
        self._error("too-deep", f"mappings and lists are nested more than {self._limits.depth} deep", span)
        raise LimitError

    def _path(self) -> Path:
        path: list[str | int] = []
        for frame in self._frames:
            if not frame.is_mapping:
                path.append(len(frame.items))
            elif frame.key is not None:
                path.append(frame.key.raw)
        return tuple(path)

    def _error(
        self,
        code: str,
        message: str,
        span: Span,
        *,
        path: Path | None = None,
        help: str | None = None,
        related: tuple[tuple[Span, str], ...] = (),
    ) -> None:
        at = self._path() if path is None else path
        self.found.append(Diagnostic(code, Severity.ERROR, message, span, at, help, related))


def _line_end(text: str, at: int) -> int:
    """Return the offset where the visible part of the line around `at` ends, `at` at least."""
    end = text.find("\n", at)
    end = len(text) if end < 0 else end
    return max(at, at + len(text[at:end].rstrip(_BLANKS)))
