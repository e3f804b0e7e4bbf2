"""Diagnostics: findings about a configuration, each with its location and remedy, and their text for people.

configs/hetero.yaml:9:18: error[placement-out-of-range]: component `actor` asks for resource 64, ...
    9 |       placement: 0-64
      |                  ^^^^
      = 8 nodes x 8 accelerators; did you mean 0-63?
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

from rlinf_core.config.secrets import mask_message, mask_text
from rlinf_core.config.tree import Path, SourceText, Span
from rlinf_core.process.known_secrets import MASK, SHORTEST
from rlinf_core.suggest import clipped, escape_of

# Most findings of one code that are kept.
MOST: Final = 100


class Severity(StrEnum):
    """The weight of a finding: an error stops a job, a warning is a likely mistake, a note informs."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Diagnostic(NamedTuple):
    """One finding.

    Attributes:
        code: the rule, in kebab case, for `rlinf explain CODE`.
        span: the underlined text.
        path: the configuration path that it concerns; empty for the whole file.
        help: the remedy in one line, or None.
        related: other relevant places, each with a short explanation.
        findings: the number of findings that it represents.
    """

    code: str
    severity: Severity
    message: str
    span: Span
    path: Path = ()
    help: str | None = None
    related: tuple[tuple[Span, str], ...] = ()
    findings: int = 1


class Diagnostics:
    """A collection of findings. The same code at the same place is kept once. The first `MOST` findings of a code are
    kept, further ones only counted."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int, int, int]] = set()
        self._kept: list[Diagnostic] = []
        self._counts: Counter[tuple[str, Severity]] = Counter()
        self._more: dict[tuple[str, Severity], Diagnostic] = {}

    def add(self, diagnostic: Diagnostic) -> None:
        code, severity, span = diagnostic.code, diagnostic.severity, diagnostic.span
        key = (code, id(span.source), span.start, span.end)
        if key in self._seen:
            return
        self._seen.add(key)
        kind = (code, severity)
        self._counts[kind] += 1
        if self._counts[kind] <= MOST:
            message = _quotable(diagnostic.message, span)
            help = diagnostic.help and _quotable(diagnostic.help, span)
            self._kept.append(diagnostic._replace(message=message, help=help))
            return
        first = self._more.get(kind)
        count = diagnostic.findings + (first.findings if first else 0)
        message = f"and {count} more of this kind"
        self._more[kind] = Diagnostic(code, severity, message, (first or diagnostic).span, findings=count)

    def error(
        self,
        code: str,
        message: str,
        span: Span,
        path: Path = (),
        help: str | None = None,
        related: tuple[tuple[Span, str], ...] = (),
    ) -> None:
        """Add an error."""
        self.add(Diagnostic(code, Severity.ERROR, message, span, path, help, related))

    def extend(self, diagnostics: Iterable[Diagnostic]) -> None:
        for diagnostic in diagnostics:
            self.add(diagnostic)

    def __iter__(self) -> Iterator[Diagnostic]:
        """Iterate by source in order of appearance (overrides last), then by position."""
        order: dict[int, int] = {}
        diagnostics = [*self._kept, *self._more.values()]
        for diagnostic in diagnostics:
            source = diagnostic.span.source
            rank = len(order) + (10**9 if source.kind == "overrides" else 0)
            order.setdefault(id(source), rank)
        return iter(sorted(diagnostics, key=lambda d: (order[id(d.span.source)], d.span.start, d.span.end, d.code)))

    def __len__(self) -> int:
        return sum(diagnostic.findings for diagnostic in self)

    def count(self, severity: Severity) -> int:
        return sum(diagnostic.findings for diagnostic in self if diagnostic.severity is severity)

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return self.count(Severity.ERROR) == 0


def _quotable(text: str, span: Span) -> str:
    """Return a message about `span` without the secrets that it quotes, clipped."""
    text, line = mask_message(text), span.source.line(span.begin.line)
    for stars in re.finditer(r"\*+", _masked(span.source)[span.begin.line - 1]):
        secret = line[slice(*stars.span())].strip("'\"")
        text = text.replace(secret, MASK) if len(secret) >= SHORTEST else text
    # Clipping may remove the name that identifies a secret, so it comes last.
    return clipped(text)


# Maximum width of the shown line, gutter included, before it is cropped around the caret.
_WIDTH: Final = 160
_TAB: Final = 4
_ELLIPSIS: Final = "…"
# Code points considered on either side of the caret: enough for any crop, and bounded for an enormous line.
_NEARBY: Final = 400

_RESET: Final = "\x1b[0m"
_BOLD: Final = "\x1b[1m"
_DIM: Final = "\x1b[2m"
_COLORS: Final = {Severity.ERROR: "\x1b[1;31m", Severity.WARNING: "\x1b[1;33m", Severity.NOTE: "\x1b[1;36m"}


def render_text(diagnostic: Diagnostic, *, color: bool = False, width: int = _WIDTH) -> str:
    """Return the finding as a text block, without a final line end.

    Only the first line of a span is shown, cropped to `width` columns around the caret. Control characters are escaped,
    and secret-looking values of the line are masked.
    """

    def paint(text: str, style: str) -> str:
        return f"{style}{text}{_RESET}" if color else text

    span = diagnostic.span
    begin = span.begin
    tint = _COLORS[diagnostic.severity]
    # A missing or empty file has no positions.
    place = f"{begin}:" if span.source.text else ""
    head = paint(f"{visible(span.source.name)}:{place}", _BOLD)
    label = paint(f"{diagnostic.severity}[{diagnostic.code}]", tint)
    lines = [f"{head} {label}: {visible(diagnostic.message)}"]

    number = str(begin.line).rjust(5)
    blank = " " * len(number)
    if span.source.text and span.source.is_quotable:
        shown = _excerpt(span, min(width, _WIDTH) - len(number) - 3)
        lines.append(f"{paint(f'{number} |', _DIM)} {shown.text}".rstrip())
        lines.append(f"{paint(f'{blank} |', _DIM)} {' ' * shown.caret}{paint('^' * shown.run, tint)}")
    notes = (diagnostic.help or "").splitlines()
    notes += [f"{words}: {place}" for place, words in diagnostic.related]
    lines += [f"{blank} {paint('=', _DIM)} {visible(note)}" for note in notes]
    return "\n".join(lines)


def visible(text: str) -> str:
    """Return `text` on one line, with control characters escaped."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character.isprintable() or character == "\u3000":
        return character
    return " " if character == "\t" else escape_of(character)


class _Excerpt(NamedTuple):
    """A displayed line, underlined by `run` carets that begin at column `caret`."""

    text: str
    caret: int
    run: int


def _excerpt(span: Span, width: int) -> _Excerpt:
    begin = span.begin
    line = _masked(span.source)[begin.line - 1].rstrip("\r")
    first = min(begin.column - 1, len(line))
    last = min(max(first + (span.end - span.start), first + 1), len(line))

    left = max(0, first - _NEARBY)
    right = min(len(line), first + _NEARBY)
    cells = _cells(line[left:right])
    columns = list(accumulate(map(_cell_width, cells), initial=0))
    caret = columns[first - left]
    run = max(1, columns[min(last, right) - left] - caret)
    if left == 0 and right == len(line) and columns[-1] <= width:
        return _Excerpt("".join(cells), caret, run)

    # Two thirds of the width follow the caret; a mark shows on which side text was cut.
    start = max(0, min(caret - width // 3, columns[-1] - width + 1))
    low = next(i for i, column in enumerate(columns) if column >= start)
    before = _ELLIPSIS if left + low > 0 else ""
    room = width - len(before)
    high = len(cells)
    if columns[high] - columns[low] > room or right < len(line):
        high = max(i for i, column in enumerate(columns) if column - columns[low] < room)
    after = _ELLIPSIS if left + high < len(line) else ""
    caret += len(before) - columns[low]
    run = max(1, min(run, columns[high] - columns[low] + len(before) - caret))
    return _Excerpt(before + "".join(cells[low:high]) + after, caret, run)


@lru_cache(maxsize=8)
def _masked(source: SourceText) -> list[str]:
    """Return the lines of a source with (multi-line) secrets masked."""
    return mask_text(source.text).split("\n")


def _cells(text: str) -> list[str]:
    """Return the printed form of each code point; a tab extends to the next tab stop."""
    cells: list[str] = []
    column = 0
    for character in text:
        cell = " " * (_TAB - column % _TAB) if character == "\t" else _visible(character)
        cells.append(cell)
        column += _cell_width(cell)
    return cells


def _cell_width(cell: str) -> int:
    if cell.isascii():
        return len(cell)
    spacing = [character for character in cell if unicodedata.category(character) not in ("Mn", "Me")]
    return len(spacing) + sum(unicodedata.east_asian_width(character) in "WF" for character in spacing)
