"""Texts of configurations as values, trees and findings, for tests of each stage."""

from __future__ import annotations

from rlinf_cli.job import machine_rules
from rlinf_core.config.composing.compose import compose
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.reading import decode, read
from rlinf_core.config.tree import Composed, MappingNode, SourceText, Span
from rlinf_core.config.validating.validation import validate
from rlinf_core.job.load import STAND_INS, ClusterFile, check_cluster

Found = list[tuple[str, int, str]]
LINES = "cluster:\n  num_nodes: 8\n" + "\n" * 6 + "      placement: 0-64\n"


def read_text(text: str, name: str = "job.yaml") -> tuple[MappingNode | None, list[Diagnostic]]:
    """Return the tree of a text, if it has one, and what was found in it."""
    diagnostics = Diagnostics()
    source = decode(name, text.encode(), diagnostics)
    return read(source, diagnostics) if source else None, list(diagnostics)


def tree_of(text: str, name: str = "job.yaml") -> MappingNode:
    """Return the tree of a text that has no mistakes."""
    tree, findings = read_text(text, name)
    assert not findings
    assert tree is not None
    return tree


def composing(
    text: str, *overrides: str, without_recipe: str | None = None, **environ: str
) -> tuple[Composed, Diagnostics]:
    """Compose a text without bases."""
    diagnostics = Diagnostics()
    source = decode("job.yaml", text.encode(), diagnostics)
    assert source is not None
    composed = compose(source, overrides, diagnostics, environ=environ, without_recipe=without_recipe)
    assert composed is not None, list(diagnostics)
    return composed, diagnostics


def check(text: str) -> list[Diagnostic]:
    """Return what shape, the rules of the core and those of the commands find in a section `cluster`."""
    diagnostics = Diagnostics()
    view = validate(ClusterFile, Composed(tree_of(text)), diagnostics, stand_ins=STAND_INS)
    assert view.model is not None, list(diagnostics)
    check_cluster(view.model.cluster, view, diagnostics, (machine_rules.check,))
    return list(diagnostics)


def faults_of(text: str) -> Found:
    """Return code, line and underlined text of what `check` finds."""
    return [(item.code, item.span.begin.line, item.span.text) for item in check(text)]


def groups(*items: str, num_nodes: int = 18) -> str:
    return f"cluster:\n  num_nodes: {num_nodes}\n  node_groups:\n" + "".join(f"    - {{{item}}}\n" for item in items)


def env(*entries: str, ranks: str = "0-7") -> str:
    return groups(f"label: a, node_ranks: {ranks}, env_configs: [{', '.join(f'{{{entry}}}' for entry in entries)}]")


def finding(
    text: str,
    piece: str,
    *,
    name: str = "configs/hetero.yaml",
    severity: Severity = Severity.ERROR,
    message: str = "component `actor` asks for resource 64, but `a800` has resources 0-63",
    help: str | None = None,
) -> Diagnostic:
    """Return a finding about a piece of a text, for tests of how findings are shown."""
    start = text.index(piece)
    span = Span(SourceText(name, text), start, start + len(piece))
    return Diagnostic("placement-out-of-range", severity, message, span, ("cluster", 0), help)
