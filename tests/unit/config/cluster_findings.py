"""Findings about the `cluster` section of a file: its shape, the rules of the core, and those of the commands."""

from __future__ import annotations

from rlinf_cli.job import machine_rules
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics
from rlinf_core.config.reading import decode, read
from rlinf_core.config.tree import Composed
from rlinf_core.config.validating.validation import validate
from rlinf_core.job.load import STAND_INS, ClusterFile, check_cluster

Found = list[tuple[str, int, str]]


def check(text: str) -> list[Diagnostic]:
    """Return what shape and rules find in a file."""
    diagnostics = Diagnostics()
    source = decode("job.yaml", text.encode(), diagnostics)
    assert source is not None
    tree = read(source, diagnostics)
    assert tree is not None
    view = validate(ClusterFile, Composed(tree), diagnostics, stand_ins=STAND_INS)
    assert view.model is not None, list(diagnostics)
    check_cluster(view.model.cluster, view, diagnostics, (machine_rules.check,))
    return list(diagnostics)


def faults_of(text: str) -> Found:
    """(code, line, underlined text) of every finding."""
    return [(item.code, item.span.begin.line, item.span.text) for item in check(text)]


def groups(*items: str, num_nodes: int = 18) -> str:
    return f"cluster:\n  num_nodes: {num_nodes}\n  node_groups:\n" + "".join(f"    - {{{item}}}\n" for item in items)


def env(*entries: str, ranks: str = "0-7") -> str:
    return groups(f"label: a, node_ranks: {ranks}, env_configs: [{', '.join(f'{{{entry}}}' for entry in entries)}]")
