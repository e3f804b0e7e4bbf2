"""The composition of YAML text into a tree with positions, by ruamel.yaml.

Duplicate keys, unknown tags, undefined aliases and other mistakes that still leave a tree are collected. Aliases become
shared nodes, and count towards the limits as if copied, which is their later cost.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.docinfo import DocInfo
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent, ScalarEvent, SequenceStartEvent
from ruamel.yaml.parser import Parser
from ruamel.yaml.scanner import Scanner, ScannerError

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.tree import Entry, MappingNode, Node, ScalarNode, SequenceNode, SourceText, Span, resolve_plain
from rlinf_core.suggest import did_you_mean, excerpt

if TYPE_CHECKING:
    # ruamel.yaml is only partly typed.
    _Composer = _Parser = _Scanner = Any
else:
    _Composer, _Parser, _Scanner = Composer, Parser, Scanner

_BLANKS: Final = " \t\r\n"
_CORE: Final = "tag:yaml.org,2002:"
# An anchor or a tag before the content of a node.
_PROPERTY: Final = re.compile(r"[&!]\S*[ \t\r\n]*")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# Blank lines and comments between tokens.
_GAP: Final = re.compile(r"(?:[ \t]*(?:(?<![^ \t\n])#[^\n\0]*|\r)?\n)*[ \t]*(?:(?<![^ \t\n])#[^\n\0]*)?")
# Limits on the number of values (without keys) after expanding aliases, and on the nesting depth: far above any real
# configuration, and low enough to stay fast.
MOST_NODES = 500_000
MOST_DEPTH = 100
# Suggestions of similar names are made for at most this many findings, among names of at most this length.
_MOST_SUGGESTIONS: Final = 20
_LONGEST_NAME: Final = 60


class _LimitError(Exception):
    """A limit was exceeded and reported; there is no tree."""


def compose(source: SourceText, text: str, start: int, end: int, diagnostics: Diagnostics) -> tuple[bool, Node | None]:
    """Return whether a text is YAML, and its value; None for a text without content.

    Args:
        source, start, end: the source and offsets of the text. If `start` is not 0, `text` has an additional blank in
            front, since `%` and `---` in the first column would be a directive and a document marker.
        text: the text.
        diagnostics: receives the findings.
    """
    # A last line of blanks needs a line end to count as a line of a block scalar.
    text += "\n" if text.endswith((" ", "\t")) else ""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Scanner, yaml.Parser, yaml.Composer = _QuickScanner, _QuickParser, _TreeComposer
    composer: _TreeComposer = yaml.composer
    composer.begin(source, text, start, end)
    root: Node | None = None
    try:
        _, parser = yaml.get_constructor_parser(text)
        yaml.doc_infos.append(DocInfo())
        if composer.check_node():
            root = composer.get_node()
            if composer.check_node():
                composer.report_second_document(parser.peek_event())
    except _LimitError:
        diagnostics.extend(composer.findings)
        return False, None
    except (YAMLError, ValueError, OverflowError, AssertionError) as error:
        # ruamel.yaml raises the last three for an escape beyond U+10FFFF and for an absurd version.
        from rlinf_core.config.yaml_hints import explain

        explain(composer.span, text, error, yaml.reader.index, diagnostics)
        return False, None
    diagnostics.extend(composer.findings)
    return True, root


class _QuickParser(_Parser):
    scanner = cached_property(lambda self: self.loader.scanner)


class _QuickScanner(_Scanner):
    """The scanner of ruamel.yaml, with tabs treated as in YAML 1.2."""

    def check_key(self) -> bool:
        """Return whether a `?` starts a key."""
        return self.reader.peek(1) in "\0 \t\r\n"

    def need_more_tokens(self) -> bool:
        """Return whether the next token may still become a key, so that more tokens are needed."""
        if self.done or not self.tokens:
            return not self.done
        for key in self.possible_simple_keys.values():
            if key.token_number == self.tokens_taken:
                self.stale_possible_simple_keys()
                return bool(self.next_possible_simple_key() == self.tokens_taken)
        return False

    def scan_to_next_token(self) -> None:
        """Skip blanks, line ends and comments. A tab in a block's indentation is an error."""
        reader = self.reader
        text, start, in_block = reader.buffer, reader.pointer, not self.flow_context
        end = cast("re.Match[str]", _GAP.match(text, start)).end()
        line = text.rfind("\n", start, end) + 1
        if in_block and line:
            self.allow_simple_key = True
        if in_block and "\t" in text[max(start, line) : end]:
            line = text.rfind("\n", 0, end) + 1
            before = text[line:end]
            if not before.strip() and text[end] != "\0":
                self._go_to(max(start, line + before.index("\t")))
                raise ScannerError(None, None, "found character '\\t' that cannot start any token", reader.get_mark())
            # No nested list or mapping may start after a tab, on which its indentation would depend.
            self.allow_simple_key = False
        self._go_to(end)
        if text[end] == "#":
            raise ScannerError(None, None, "a comment follows without a blank", reader.get_mark())

    def _go_to(self, end: int) -> None:
        reader = self.reader
        text, start = reader.buffer, reader.pointer
        breaks = text.count("\n", start, end)
        reader.line += breaks
        reader.column = end - text.rfind("\n", start, end) - 1 if breaks else reader.column + end - start
        reader.pointer = reader.index = end


class _Anchored(NamedTuple):
    """A finished node with an anchor: its number of values, and its depth (0 for a scalar)."""

    node: Node
    size: int
    height: int


class _TreeComposer(_Composer):
    """A composer of one text into our nodes, innermost first."""

    parser = cached_property(lambda self: self.loader.parser)

    def begin(self, source: SourceText, text: str, start: int, end: int) -> None:
        """Set the text and its range in the source."""
        self._source, self._text, self._shift = source, text, start - 1 if start else 0
        self._start, self._stop = start, end
        self.findings = Diagnostics()
        self._anchored: dict[str, _Anchored | None] = {}
        self._path: list[str | int] = []
        self._count = self._depth = self._deepest = self._undefined = 0
        # The end of the last value or key, since a block's own end is after the comments that follow it.
        self._last = 0

    def span(self, start: int, end: int | None = None) -> Span:
        """Return the span in the source of a range of the text; by default one character."""
        first, stop = start + self._shift, (start + 1 if end is None else end) + self._shift
        if first < self._start or stop > self._stop:
            first = max(self._start, min(first, self._stop))
            stop = max(first, min(stop, self._stop))
        return Span(self._source, first, stop)

    def compose_node(self, parent: Any, index: Any) -> Node:
        """Return the next node: an item or a value of `parent`, or, if `index` is None, a key."""
        event = self.parser.peek_event()
        is_key = index is None and parent is not None
        key = index if isinstance(index, ScalarNode) else None
        segment = key.raw if key is not None else index if isinstance(index, int) else None
        if segment is not None:
            self._path.append(segment)
        if type(event) is AliasEvent:
            node = self._alias(self.parser.get_event(), is_key)
        else:
            node = self._content_of(event, key, is_key)
        if segment is not None:
            self._path.pop()
        return node

    def _content_of(self, event: Any, key: ScalarNode | None, is_key: bool) -> Node:
        anchor = event.anchor
        if not is_key:
            self._counted(1, event.start_mark.index)
        size, deepest = self._count, self._deepest
        if anchor is not None:
            self._deepest, self._anchored[anchor] = self._depth, None
        is_scalar = type(event) is ScalarEvent
        node: Node = self._scalar(self.parser.get_event(), key) if is_scalar else self._collection(event)
        if anchor is not None:
            if self._anchored[anchor] is None:  # else a nested node has taken the name
                self._anchored[anchor] = _Anchored(node, 1 + self._count - size, self._deepest - self._depth)
            self._deepest = max(deepest, self._deepest)
        return node

    def _collection(self, event: Any) -> MappingNode | SequenceNode:
        kind = "seq" if isinstance(event, SequenceStartEvent) else "map"
        bracketed = bool(cast("Any", event).flow_style)
        tag, start = self._content(event, len(self._text))
        if tag is not None:
            self._tagged(event, "", kind, tag, self.span(start))
        self._depth += 1
        self._deepest = max(self._deepest, self._depth)
        if self._depth > MOST_DEPTH:
            self._too_deep(self.span(start))
        raw = self.compose_mapping_node(None) if kind == "map" else self.compose_sequence_node(None)
        self._depth -= 1
        if bracketed and self._text[start : start + 1] in ("{", "["):
            self._last = raw.end_mark.index
        span = self.span(start, max(start, self._last))
        return MappingNode(span, self._entries(raw.value)) if kind == "map" else SequenceNode(span, tuple(raw.value))

    def _content(self, event: Any, end: int) -> tuple[Span | None, int]:
        """Return the span of a node's tag, or None, and the offset where its content starts."""
        start = event.start_mark.index
        tag = self.span(start) if event.ctag is not None else None
        for _ in range((event.anchor is not None) + (event.ctag is not None)):
            match = _PROPERTY.match(self._text, start, end)
            if match is None:
                break
            if match[0][0] == "!":
                tag = self.span(start, start + len(match[0].rstrip(_BLANKS)))
            start = match.end()
        return tag, start

    def _scalar(self, event: Any, key: ScalarNode | None) -> ScalarNode:
        text: str = event.value
        start, end, style = event.start_mark.index, event.end_mark.index, event.style
        tag: Span | None = None
        if event.anchor is not None or event.ctag is not None:
            tag, start = self._content(event, end)
        plain = style is None
        if style in ("|", ">"):
            end = start + len(self._text[start:end].rstrip(_BLANKS))
        span = self.span(start, end)
        if not plain or text or key is None:
            self._last = max(self._last, end)
        else:
            span = Span(span.source, key.span.end, key.span.end)  # an empty value is at the end of its key
        if style == '"' and _SURROGATE.search(text):
            text = self._whole_characters(text, span)
        if tag is not None:
            value, plain = self._tagged(event, text, "scalar", tag, span)
        else:
            value = resolve_plain(text) if plain else text
        return ScalarNode(span, text, value, plain)

    def _alias(self, event: Any, is_key: bool) -> Node:
        name: str = event.anchor
        start, self._last = event.start_mark.index, event.end_mark.index
        span = self.span(start, self._last)
        if name not in self._anchored:
            self._undefined += 1
            few = self._undefined <= _MOST_SUGGESTIONS and len(name) <= _LONGEST_NAME
            names = (other for other in self._anchored if other and len(other) <= _LONGEST_NAME)
            help = (did_you_mean(name, names) if few else None) or "quote the value if it is meant to start with `*`"
            self._error("undefined-alias", f"`*{excerpt(name)}` names no earlier anchor", span, help)
            return ScalarNode(span, f"*{name}", None)
        anchored = self._anchored[name]
        if anchored is None:
            self._error("recursive-alias", f"`*{excerpt(name)}` is inside the value that it names", span)
            return ScalarNode(span, f"*{name}", None)
        if self._depth + anchored.height > MOST_DEPTH:
            self._too_deep(span)
        self._deepest = max(self._deepest, self._depth + anchored.height)
        self._counted(anchored.size, start, span)
        node = anchored.node
        if is_key and isinstance(node, ScalarNode):
            node = ScalarNode(span, node.raw, node.value, node.plain)
        return node

    def _entries(self, pairs: list[tuple[Node, Node]]) -> tuple[Entry, ...]:
        """Return the entries of a mapping with `<<` expanded in place: own keys win, then earlier merged mappings."""
        own: dict[str, Entry] = {}
        merges: list[tuple[int, Entry]] = []
        for name, value in pairs:
            key = self._key(name)
            if key is None:
                continue
            is_merge = key.raw == "<<" and key.plain
            first = merges[0][1] if is_merge and merges else None if is_merge else own.get(key.raw)
            if first is not None:
                related = ((first.key.span, "first written here"),)
                message = f"key `{excerpt(key.raw)}` appears twice in the same mapping"
                self._error("duplicate-key", message, key.span, "keep one of the two", related, (key.raw,))
            elif is_merge:
                merges.append((len(own), Entry(key, value)))
            else:
                own[key.raw] = Entry(key, value)
        if not merges:
            return tuple(own.values())
        place, merge = merges[0]
        merged: dict[str, Entry] = {}
        for mapping in self._merge_sources(merge.value):
            for entry in mapping.entries:
                if entry.key.raw not in own:
                    merged.setdefault(entry.key.raw, entry)
        entries = tuple(own.values())
        return (*entries[:place], *merged.values(), *entries[place:])

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
        message = f"a {'mapping' if isinstance(node, MappingNode) else 'list'} is in the place of a key"
        help = "quote the whole value if `{{ ... }}` is meant as text" if template else "a key is a name or a number"
        self._error("complex-key", message, span.part(0, len(span.text.partition("\n")[0].rstrip())), help)
        return None

    def _merge_sources(self, value: Node) -> list[MappingNode]:
        candidates = value.items if isinstance(value, SequenceNode) else (value,)
        for node in candidates:
            is_reported = isinstance(node, ScalarNode) and node.raw.startswith("*") and node.plain
            if not isinstance(node, MappingNode) and not is_reported:
                message = "`<<` takes a mapping or a list of mappings, as in `<<: *name`"
                self._error("bad-merge", message, node.span, "quote the key if it is meant to be the text `<<`")
        return [node for node in candidates if isinstance(node, MappingNode)]

    def _tagged(self, event: Any, raw: str, kind: str, span: Span, content: Span) -> tuple[Any, bool]:
        """Return the value of a tagged node and whether it was resolved; report a tag that does not fit."""
        tag, written = str(event.ctag), f"{event.ctag.handle or ''}{event.ctag.suffix}"
        # A lone `!` makes a scalar text, and has no meaning for a collection.
        name = ("str" if kind == "scalar" else kind) if tag == "!" else tag.removeprefix(_CORE)
        if (name == tag != "!") or name not in (*_SCALAR_TAGS, "str", "map", "seq"):
            help = _TAG_HELP.get(written.lower(), "remove the tag, or quote the value if the `!` belongs to it")
            message = f"the tag `{excerpt(written)}` is unknown; only plain data are read"
            self._error("unknown-tag", message, span, help)
            return raw, False
        if name == (kind if kind != "scalar" else "str"):
            return raw, False
        value = resolve_plain(raw) if kind == "scalar" else raw
        if name == "float" and type(value) is int and abs(value) < 10**300:
            value = float(value)
        if kind == "scalar" and type(value) is _SCALAR_TAGS.get(name):
            return value, True
        what = {"map": "a mapping", "seq": "a list"}.get(kind, f"`{excerpt(raw)}`")
        message = f"the tag `{excerpt(written)}` does not fit {what}"
        self._error("tag-mismatch", message, span, "remove the tag", ((content, "the value"),))
        return raw, False

    def _whole_characters(self, raw: str, span: Span) -> str:
        r"""Return `raw` with surrogate pairs, as JSON's `"\ud83d\ude00"`, joined; report a lone surrogate."""
        joined = raw.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if joined.count("\ufffd") > raw.count("\ufffd"):
            message = "an escape in this text is half a character"
            help = "write the character itself, or its full escape such as `\\U0001F600`"
            self._error("lone-surrogate", message, span, help)
        return joined

    def _counted(self, nodes: int, start: int, span: Span | None = None) -> None:
        self._count += nodes
        if self._count > MOST_NODES:
            by_alias = "after expanding aliases, " if nodes > 1 else ""
            message = f"{by_alias}there are more than {MOST_NODES} values here"
            help = "write large data to a separate file and set its path"
            self._error("too-many-nodes", message, span or self.span(start), help)
            raise _LimitError

    def _too_deep(self, span: Span) -> None:
        self._error("too-deep", f"mappings and lists are nested more than {MOST_DEPTH} deep", span)
        raise _LimitError

    def report_second_document(self, event: Any) -> None:
        """Report a document after the first."""
        start, end = event.start_mark.index, event.end_mark.index
        end = start + len(self._text[start:].partition("\n")[0].rstrip()) if start == end else end
        message = "a second document starts here; a configuration is one document"
        help = "keep one document per file; `extends: FILE` builds on another file"
        self._error("several-documents", message, self.span(start, end), help)

    def _error(
        self,
        code: str,
        message: str,
        span: Span,
        help: str | None = None,
        related: tuple[tuple[Span, str], ...] = (),
        below: tuple[str, ...] = (),
    ) -> None:
        self.findings.error(code, message, span, (*self._path, *below), help, related)


# Tags of other tools, each with its remedy.
_TAG_HELP: Final = {
    "!env": "write `${env:NAME}` for a variable of the environment",
    "!include": "write `extends: FILE` at the top level to build on another file",
}
_SCALAR_TAGS: Final = {"int": int, "float": float, "bool": bool, "null": type(None)}
