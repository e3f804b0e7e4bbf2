"""The text for the YAML parser, without common indentation, and its offsets in the source."""

from __future__ import annotations

from bisect import bisect_right

from rlinf_core.config.source import SourceText, Span

_BLANKS = " \t"


class Indentation:
    """A source, or a part of one, for the parser: `text`, without the common indentation `prefix`."""

    __slots__ = ("_line_starts", "_shifts", "_start", "prefix", "source", "text")

    def __init__(self, source: SourceText, text: str, start: int, shift: int) -> None:
        self.source = source
        self.text = text
        self.prefix = ""
        self._start = start
        # The parser's offset `_line_starts[i]` is the original's `_line_starts[i] + _shifts[i]`.
        self._line_starts = [0]
        self._shifts = [shift]

    @classmethod
    def of_file(cls, source: SourceText) -> Indentation:
        """Return a whole source, without the common indentation of its lines."""
        layout = cls(source, source.text, 0, 0)
        layout.prefix = _shared_prefix(source.text)
        if layout.prefix:
            layout._take_off_prefix()
        return layout

    @classmethod
    def of_value(cls, source: SourceText, start: int, end: int) -> Indentation:
        """Return a value inside a larger text."""
        # The blank keeps `%` and `---` out of the first column, where they are a directive and a document marker.
        return cls(source, " " + source.text[start:end], start, start - 1)

    def _take_off_prefix(self) -> None:
        kept: list[str] = []
        self._line_starts.clear()
        self._shifts.clear()
        at = shift = 0
        for line in self.text.split("\n"):
            # A blank line may be shorter than the prefix or have other blanks.
            rest = line[len(self.prefix) :] if line.startswith(self.prefix) else line.lstrip(_BLANKS)
            shift += len(line) - len(rest)
            self._line_starts.append(at)
            self._shifts.append(shift)
            kept.append(rest)
            at += len(rest) + 1
        self.text = "\n".join(kept)

    def offset(self, at: int) -> int:
        """Return the offset in the source of the parser's offset `at`."""
        if len(self._shifts) == 1:
            return max(self._start, at + self._shifts[0])
        return at + self._shifts[bisect_right(self._line_starts, at) - 1]

    def span(self, start: int, end: int) -> Span:
        """Return the span in the source of the parser's range from `start` to before `end`."""
        first = self.offset(start)
        # The end of the last character, not the start of the next one: a line's prefix may be between.
        return Span(self.source, first, self.offset(end - 1) + 1 if end > start else first)


def _shared_prefix(text: str) -> str:
    """Return the common indentation of all lines that are not blank."""
    lines = [line for line in text.split("\n") if line.strip(_BLANKS + "\r")]
    if not lines or lines[0][0] not in _BLANKS:
        return ""
    prefix = lines[0][: len(lines[0]) - len(lines[0].lstrip(_BLANKS))]
    for line in lines:
        while not line.startswith(prefix):
            prefix = prefix[:-1]
    return prefix
