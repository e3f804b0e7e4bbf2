"""The text given to the YAML parser, without blanks or a tab before every line, and its offsets in the source."""

from __future__ import annotations

from bisect import bisect_right

from rlinf_core.config.source import SourceText, Span

_BLANKS = " \t"


class Indentation:
    """A source, or a piece of one, as handed to the parser: `text`, without the blanks `prefix` before every line."""

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
        """Return the whole of a source, without the blanks that all its lines share."""
        layout = cls(source, source.text, 0, 0)
        layout.prefix = _shared_prefix(source.text)
        if layout.prefix:
            layout._take_off_prefix()
        return layout

    @classmethod
    def of_value(cls, source: SourceText, start: int, end: int) -> Indentation:
        """Return a value that stands within a larger text."""
        # The blank keeps `%` and `---` from being a directive and a document mark, as they are in a first column.
        return cls(source, " " + source.text[start:end], start, start - 1)

    def _take_off_prefix(self) -> None:
        kept: list[str] = []
        self._line_starts.clear()
        self._shifts.clear()
        at = shift = 0
        for line in self.text.split("\n"):
            # A line of blanks may be shorter than the prefix or hold other blanks.
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
        """Return the place in the source of the parser's `start` up to but not including `end`."""
        first = self.offset(start)
        # The end is where the last character ends, not where the next one starts: a line's prefix lies between.
        return Span(self.source, first, self.offset(end - 1) + 1 if end > start else first)


def _shared_prefix(text: str) -> str:
    """Return the blanks that every line which is not blank starts with."""
    lines = [line for line in text.split("\n") if line.strip(_BLANKS + "\r")]
    if not lines or lines[0][0] not in _BLANKS:
        return ""
    prefix = lines[0][: len(lines[0]) - len(lines[0].lstrip(_BLANKS))]
    for line in lines:
        while not line.startswith(prefix):
            prefix = prefix[:-1]
    return prefix
