"""Diagnostics: findings about a configuration, each with its location and remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final, NamedTuple

from rlinf_core.config.secrets import mask_message
from rlinf_core.config.source import Span
from rlinf_core.config.tree import Path
from rlinf_core.suggest import LONGEST_LINE, clipped

# Findings of one code.
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
        path: the configuration path it concerns, empty for the whole file.
        help: the remedy in one line, or None.
        related: other relevant places, each with a short explanation.
        findings: how many findings it stands for.
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
    """A collection of findings. The same code at the same place is kept once; of one code the first hundred are kept,
    and the others counted."""

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
            message, help = _quotable(diagnostic.message), diagnostic.help and _quotable(diagnostic.help)
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


def _quotable(text: str) -> str:
    # Secrets first: where a quotation is clipped, its name may be gone.
    return text if len(text) <= LONGEST_LINE else clipped(mask_message(text))
