"""The interface to the YAML parser: from text to a stream of events, or a `YamlSyntaxError`.

The scanner of ruamel.yaml follows YAML 1.1 in places. Where it silently deviates from YAML 1.2 it is corrected here;
the yaml-test-suite shows what remains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import ScalarEvent
from ruamel.yaml.scanner import Scanner, ScannerError
from ruamel.yaml.tokens import FlowMappingEndToken, FlowSequenceEndToken, ScalarToken

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = Scanner

# Blank lines, comments and directives before the content.
_HEADER = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n|%[^\n]*\n)*")
_VERSION = re.compile(r"^%YAML(?![^\s])[ \t]*([^\n#]*?)[ \t\r]*(?:#[^\n]*)?$", re.MULTILINE)
# Line ends in YAML 1.1 and ordinary characters in 1.2; the parser would still end a comment or fold a text at them.
_FORMER_LINE_ENDS = "\x85\u2028\u2029"
_TOO_LARGE_ESCAPE = re.compile(r"\\U(?!000|0010)[0-9A-Fa-f]{8}")

# The parser's buffer ends with a NUL.
_ENDS = "\0 \t\r\n"
_FLOW_ENDS = _ENDS + ",[]{}"
_INDICATORS = frozenset("\0 \t\r\n-?:,[]{}#&*!|>'\"%@`")
_GAP = re.compile(r"(?:[ \t]*(?:(?<![^ \t\n])#[^\n\0]*|\r)?\n)*[ \t]*(?:(?<![^ \t\n])#[^\n\0]*)?")
_BLANKS = re.compile(r"[ \t]*")
_SPACES = re.compile(r" *")
_LINE_ENDS = re.compile(r"[ \t]*\r?\n((?:[ \t]*\r?\n)*)")
_DOCUMENT_MARK = re.compile(r"(?:---|\.\.\.)[\0 \t\r\n]")


def _line_of_text(ends: str) -> re.Pattern[str]:
    ends = re.escape(ends)
    word = f"(?:[^:{ends}]|:(?![{ends}]))+"
    return re.compile(f"{word}(?:[ \t]+(?!#){word})*")


# What an unquoted value may hold on one line, outside of brackets and within them.
_PLAIN, _FLOW_PLAIN = _line_of_text(_ENDS), _line_of_text(_FLOW_ENDS)


class YamlSyntaxError(Exception):
    """The text is not YAML.

    Attributes:
        problem: the parser's own words.
        at: the offset at which the parser stopped.
        context, context_at: the construct being parsed, or "", and the offset of its start.
    """

    def __init__(self, problem: str, at: int, context: str = "", context_at: int | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.at = at
        self.context = context
        self.context_at = context_at


class _Scanner(_Base):
    """The scanner of ruamel.yaml with the rules of YAML 1.2 for unquoted values, keys, comments and tabs."""

    def _go_to(self, end: int) -> None:
        reader = self.reader
        text, start = reader.buffer, reader.pointer
        breaks = text.count("\n", start, end)
        reader.line += breaks
        reader.column = end - text.rfind("\n", start, end) - 1 if breaks else reader.column + end - start
        reader.pointer = reader.index = end

    def scan_to_next_token(self) -> None:
        """Skip blanks, line ends and comments. A tab in a block's indentation is an error."""
        reader = self.reader
        text, start, in_block = reader.buffer, reader.pointer, not self.flow_level
        end = cast("re.Match[str]", _GAP.match(text, start)).end()
        if text[end] == "#":
            self._go_to(end)
            raise ScannerError(None, None, "a comment follows without a blank", reader.get_mark())
        if in_block and text.find("\n", start, end) >= 0:
            self.allow_simple_key = True
        if in_block and "\t" in text[start:end]:
            line = text.rfind("\n", 0, end) + 1
            before = text[line:end]
            if "\t" in before and not before.strip() and text[end] != "\0":
                self._go_to(max(start, line + before.index("\t")))
                raise ScannerError(None, None, "found character '\\t' that cannot start any token", reader.get_mark())
            if "\t" in before:
                # No nested list or mapping may start after it: its indentation would depend on the tab.
                self.allow_simple_key = False
        self._go_to(end)

    def stale_possible_simple_keys(self) -> None:
        """Drop keys that no `:` can follow any more. Inside braces it may be on a later line."""
        reader = self.reader
        for level, key in list(self.possible_simple_keys.items()):
            too_long = reader.index - key.index > 1024
            if too_long or (key.line != reader.line and not (level and self.flow_context[level - 1] == "{")):
                if key.required:
                    problem = "could not find expected ':'"
                    raise ScannerError("while scanning a simple key", key.mark, problem, reader.get_mark())
                del self.possible_simple_keys[level]

    def check_key(self) -> bool:
        """Return whether a `?` starts a key."""
        return self.reader.peek(1) in _ENDS

    def check_value(self) -> bool:
        """Return whether a `:` ends a key."""
        following = self.reader.peek(1)
        if following in _ENDS or not self.flow_level:
            return following in _ENDS
        last = self.tokens[-1] if self.tokens else None
        quoted = isinstance(last, ScalarToken) and not cast("Any", last).plain
        return following in ",]}" or quoted or isinstance(last, FlowSequenceEndToken | FlowMappingEndToken)

    def check_plain(self) -> bool:
        """Return whether an unquoted value starts here."""
        first = self.reader.peek()
        if first not in _INDICATORS:
            return True
        return first in "-?:" and self.reader.peek(1) not in (_FLOW_ENDS if self.flow_level else _ENDS)

    def scan_plain(self) -> ScalarToken:
        """Return the unquoted value that starts here."""
        reader, pattern = self.reader, _FLOW_PLAIN if self.flow_level else _PLAIN
        indent = self.indent + 1
        start = end = reader.get_mark()
        chunks: list[str] = []
        space = ""
        while reader.peek() != "#" and (match := pattern.match(reader.buffer, reader.pointer)):
            chunks += (space, match[0])
            self.allow_simple_key = False
            self._go_to(match.end())
            end = reader.get_mark()
            space = self._space_within_plain(indent)
            if not space or (not self.flow_level and reader.column < indent):
                break
        return ScalarToken("".join(chunks), True, start, end)

    def _space_within_plain(self, indent: int) -> str:
        """Skip blanks and line ends and return their value inside an unquoted value; "" at its end."""
        reader, text = self.reader, self.reader.buffer
        match = _LINE_ENDS.match(text, reader.pointer)
        if match is None:
            blanks = cast("re.Match[str]", _BLANKS.match(text, reader.pointer))
            self._go_to(blanks.end())
            return blanks[0]
        self._go_to(match.end())
        self.allow_simple_key = True
        if _DOCUMENT_MARK.match(text, reader.pointer):
            return ""
        self._go_to(cast("re.Match[str]", _SPACES.match(text, reader.pointer)).end())
        if self.flow_level or reader.column >= indent:
            self._go_to(cast("re.Match[str]", _BLANKS.match(text, reader.pointer)).end())
        return "\n" * match[1].count("\n") or " "

    def scan_block_scalar_indentation(self) -> tuple[list[str], int, Any]:
        """Skip the empty lines before a block of text; return them, the block's indentation and their end."""
        reader = self.reader
        breaks: list[str] = []
        deepest, end = 0, reader.get_mark()
        while True:
            self._go_to(cast("re.Match[str]", _SPACES.match(reader.buffer, reader.pointer)).end())
            if reader.peek() not in "\r\n":
                break
            deepest = max(deepest, reader.column)
            breaks.append(self.scan_line_break())
            end = reader.get_mark()
        if deepest > reader.column > self.indent:
            problem = "an empty line before this text is indented deeper"
            raise ScannerError("while scanning a block scalar", end, problem, reader.get_mark())
        return breaks, reader.column, end


def version_directives(text: str) -> list[re.Match[str]]:
    """Return the `%YAML` lines before the content, each with the version as its group 1."""
    header = _HEADER.match(text)
    return list(_VERSION.finditer(text, 0, header.end() if header else 0))


def _stand_ins(text: str) -> dict[str, str]:
    """Return replacements for former line ends that occur in `text` neither literally nor as an escape."""
    present = [character for character in _FORMER_LINE_ENDS if character in text]
    if not present:
        return {}
    lowered = text.lower()
    unused = (chr(code) for code in range(0xFDD0, 0xFDF0) if chr(code) not in text and f"{code:x}" not in lowered)
    return dict(zip(unused, present, strict=False))


def parse_events(text: str) -> Iterator[Any]:
    """Return the events of `text`, lazily. A version directive has no effect.

    Raises:
        YamlSyntaxError: where `text` is not YAML; the events before that place have been delivered.
    """
    yaml = cast("Any", YAML(typ="safe", pure=True))
    yaml.Scanner = _Scanner
    stand_ins = _stand_ins(text)
    text = text.translate({ord(original): stand_in for stand_in, original in stand_ins.items()})
    originals = str.maketrans(stand_ins)
    for directive in version_directives(text):
        # Turned into a comment: `%YAML 1.1` would switch the parser to other rules.
        text = text[: directive.start()] + "#" + text[directive.start() + 1 :]
    if text.endswith((" ", "\t")):
        text += "\n"  # a last line of blanks is a line: one of a block of text
    last = 0
    try:
        for event in yaml.parse(text):
            last = event.end_mark.index
            if originals and isinstance(event, ScalarEvent):
                cast("Any", event).value = cast("Any", event).value.translate(originals)
            yield event
    except MarkedYAMLError as caught:
        error = cast("Any", caught)
        at = error.problem_mark.index if error.problem_mark else last
        context_at = error.context_mark.index if error.context_mark else None
        raise YamlSyntaxError(error.problem or "", at, error.context or "", context_at) from None
    except (ValueError, OverflowError, AssertionError):
        # Raised by the parser for an escape beyond U+10FFFF, and for an absurd version in a later document.
        escape = _TOO_LARGE_ESCAPE.search(text, last)
        raise YamlSyntaxError("a number is too large", escape.start() if escape else last) from None
    except YAMLError as error:
        raise YamlSyntaxError(str(error), last) from None
