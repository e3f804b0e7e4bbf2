"""The interface to the YAML parser: text becomes a stream of events, or a `YamlSyntaxError`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import ScalarEvent
from ruamel.yaml.scanner import Scanner

# Blank lines, comments and directives: what may stand before the content.
_HEADER = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n|%[^\n]*\n)*")
_VERSION = re.compile(r"^%YAML[ \t]+(\S*)[^\n]*", re.MULTILINE)
# Line ends in YAML 1.1 and ordinary characters in 1.2; the parser would still end a comment or fold a text at them.
_FORMER_LINE_ENDS = "\x85\u2028\u2029"
_TOO_LARGE_ESCAPE = re.compile(r"\\U(?!000|0010)[0-9A-Fa-f]{8}")


class YamlSyntaxError(Exception):
    """The text is not YAML.

    Attributes:
        problem: the parser's own words.
        at: the offset at which the parser gave up.
        context, context_at: what it was doing, or "", and the offset at which that began.
    """

    def __init__(self, problem: str, at: int, context: str = "", context_at: int | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.at = at
        self.context = context
        self.context_at = context_at


class _TabTolerantScanner(Scanner):
    """A scanner that accepts the tabs that YAML allows: after a value or a colon, before a comment, on a blank line.

    The base class refuses every tab between two tokens. One that indents is still refused, and so is one after `-` and
    `?`, where it would count as indentation of a nested collection.
    """

    def scan_to_next_token(self) -> None:
        base = cast("Any", super())
        base.scan_to_next_token()
        reader = cast("Any", self).reader
        while reader.peek() == "\t" and _separates(reader.buffer, reader.pointer):
            while reader.peek() in " \t":
                reader.forward()
            base.scan_to_next_token()


def _separates(text: str, at: int) -> bool:
    before = text[text.rfind("\n", 0, at) + 1 : at].rstrip(" \t")
    if before:
        return before[-1] not in "-?"
    while text[at] in " \t":
        at += 1
    return text[at] in "#\r\n\0"


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
    if "\t" in text:
        yaml.Scanner = _TabTolerantScanner
    stand_ins = _stand_ins(text)
    text = text.translate({ord(original): stand_in for stand_in, original in stand_ins.items()})
    originals = str.maketrans(stand_ins)
    for directive in version_directives(text):
        # To the parser it is a comment: it would take `%YAML 1.1` as leave to read the rest by other rules.
        text = text[: directive.start()] + "#" + text[directive.start() + 1 :]
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
