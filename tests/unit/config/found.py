"""A finding as checks report it, for tests of how findings are shown."""

from __future__ import annotations

from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.source import SourceText, Span

LINES = "cluster:\n  num_nodes: 8\n" + "\n" * 6 + "      placement: 0-64\n"


def finding(
    text: str,
    piece: str,
    *,
    name: str = "configs/hetero.yaml",
    severity: Severity = Severity.ERROR,
    message: str = "component `actor` asks for resource 64, but `a800` has resources 0-63",
    help: str | None = None,
) -> Diagnostic:
    start = text.index(piece)
    source = SourceText(name, text)
    return Diagnostic(
        "placement-out-of-range", severity, message, Span(source, start, start + len(piece)), ("cluster", 0), help
    )
