"""The streams of the command line: characters that a terminal would act on are escaped, whoever prints them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final, TextIO, cast

from rlinf_core.foreign.terminal_text import escaped

_COLOUR: Final = (
    r"(?:0|[1-4]|7|2[1-47-9]|3[0-79]|4[0-79]|9[0-7]|10[0-7]|[34]8;5;\d{1,3}|[34]8;2;\d{1,3};\d{1,3};\d{1,3})"
)
_RESETS: Final = frozenset(("\x1b[0m", "\x1b[m"))


@cache
def _colours() -> re.Pattern[str]:
    """Return the pattern of colours and weights alone: not concealed, not blinking. Few commands need it."""
    return re.compile(rf"\x1b\[(?:{_COLOUR}(?:;{_COLOUR})*)?m")


def in_colours(text: str, colours: bool) -> str:
    """Return a text like `escaped`, but for sequences that set colours: they stay, or are left out.

    Args:
        text: the text of any lines.
        colours: whether they stay. The last of them then ends with the text.
    """
    if "\x1b" not in text:
        return escaped(text)
    parts = list[str]()
    end, last = 0, ""
    for match in _colours().finditer(text):
        parts.append(escaped(text[end : match.start()]))
        if colours:
            last = match[0]
            parts.append(last)
        end = match.end()
    parts.append(escaped(text[end:]))
    whole = "".join(parts)
    if not last or last in _RESETS:
        return whole
    body = whole.rstrip("\n")
    return f"{body}\x1b[0m{whole[len(body) :]}"


class TerminalStream:
    """A text stream that writes what a terminal must not act on as escapes. All else is that of the stream.

    Args:
        stream: the one to write to.
        colours: whether it shows colours.
        mask: returns a text without secrets.
    """

    def __init__(self, stream: TextIO, colours: bool, mask: Callable[[str], str]) -> None:
        self.stream = stream
        self._colours = colours
        self._mask = mask

    def write(self, text: str) -> int:
        """Write a text; return its length. A carriage return may begin it, as in the lines of progress bars."""
        start = "\r" if text.startswith("\r") and not text.startswith("\r\n") else ""
        self.stream.write(start + in_colours(self._mask(text[len(start) :]), self._colours))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __iter__(self) -> Any:
        return iter(self.stream)


def guarded_stream(stream: TextIO, colours: bool, mask: Callable[[str], str] = str) -> TextIO:
    """Return a stream around another one; see `TerminalStream`."""
    return cast("TextIO", TerminalStream(stream, colours, mask))


def unguarded_stream(stream: TextIO) -> TextIO:
    """Return the stream itself, for a view that moves the cursor and escapes its texts by itself."""
    while isinstance(stream, TerminalStream):
        stream = stream.stream
    return stream
