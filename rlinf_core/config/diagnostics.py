"""Diagnostics: findings about a configuration, each with its location and remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from rlinf_core.config.source import Span
from rlinf_core.config.tree import Path


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
        path: the configuration path it concerns, empty for the whole file.
        help: the remedy in one line, or None.
        related: other relevant places, each with a short explanation.
    """

    code: str
    severity: Severity
    message: str
    span: Span
    path: Path = ()
    help: str | None = None
    related: tuple[tuple[Span, str], ...] = ()


class Diagnostics:
    """A collection of findings. The same code at the same place is kept once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, int, int], Diagnostic] = {}

    def add(self, diagnostic: Diagnostic) -> None:
        span = diagnostic.span
        self._found.setdefault((diagnostic.code, id(span.source), span.start, span.end), diagnostic)

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
        for diagnostic in self._found.values():
            source = diagnostic.span.source
            rank = len(order) + (10**9 if source.kind == "overrides" else 0)
            order.setdefault(id(source), rank)
        return iter(
            sorted(
                self._found.values(),
                key=lambda d: (order[id(d.span.source)], d.span.start, d.span.end, d.code),
            )
        )

    def __len__(self) -> int:
        return len(self._found)

    def count(self, severity: Severity) -> int:
        return sum(1 for diagnostic in self._found.values() if diagnostic.severity is severity)

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return self.count(Severity.ERROR) == 0
