"""Hardware of nodes against declarations, as text and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf_cli.cluster.checks.devices import found_text, judged
from rlinf_cli.cluster.checks.finding import CheckVerdict, Finding, ProbedNode, size
from rlinf_cli.cluster.doctor import Look
from rlinf_cli.cluster.doctor_findings import finding_record
from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode

SCHEMA = "rlinf.hardware/1"
_WRONG = (CheckVerdict.FAULT, CheckVerdict.UNREACHABLE)


def hardware_result(nodes: Sequence[NodeTarget], look: Look) -> Result:
    """Return the hardware of nodes, and the exit code."""
    findings = [*look.findings, *judged(look.probed)]
    verdicts = {finding.verdict for finding in findings}
    code = ExitCode.FAILED if CheckVerdict.FAULT in verdicts else ExitCode.OK
    return Result(
        lambda: hardware_text(nodes, look.probed, findings),
        lambda: hardware_record(nodes, look.probed, findings),
        ExitCode.UNREACHABLE if CheckVerdict.UNREACHABLE in verdicts else code,
    )


def hardware_text(nodes: Sequence[NodeTarget], probed: Sequence[ProbedNode], findings: Sequence[Finding]) -> str:
    """Return a line for each node, then the deviations from the declarations."""
    by_rank = {machine.node.rank: machine for machine in probed}
    headers = ("node", "group", "host", "cores", "memory", "declared", "accelerators", "robots and cameras")
    rows = [_row(node, by_rank.get(node.rank), findings) for node in nodes]
    blocks = [console.table(headers, rows, right=(0, 3))]
    wrong = [finding for finding in findings if finding.verdict in _WRONG]
    if wrong:
        blocks.append("\n".join(_trouble(finding) for finding in wrong))
    return "\n\n".join(blocks)


def _row(node: NodeTarget, probed: ProbedNode | None, findings: Sequence[Finding]) -> tuple[str, ...]:
    attached = [finding for finding in findings if finding.rank == node.rank and finding.check in ("robot", "camera")]
    facts = probed.facts if probed else None
    return (
        str(node.rank),
        ", ".join(node.groups) or "-",
        node.host or "this machine",
        str(facts["cores"]) if facts else "-",
        size(facts["memory"]) if facts else "-",
        _declared(node),
        found_text(facts["accelerators"]) if facts else "not reached",
        "; ".join(finding.what for finding in attached) or "-",
    )


def _declared(node: NodeTarget) -> str:
    if node.accelerators is None:
        return "-"
    count = node.accelerators.per_node
    return f"{count} x {node.accelerators.model}" if node.accelerators.model and count else str(count)


def _trouble(finding: Finding) -> str:
    line = f"{finding.verdict}: {finding.where}: {finding.what}"
    return f"{line}\n  do: {finding.help}" if finding.help else line


def hardware_record(
    nodes: Sequence[NodeTarget], probed: Sequence[ProbedNode], findings: Sequence[Finding]
) -> dict[str, Any]:
    """Return the same as data."""
    by_rank = {machine.node.rank: machine for machine in probed}
    return {
        "schema": SCHEMA,
        "ok": not any(finding.verdict in _WRONG for finding in findings),
        "nodes": [_node_record(node, by_rank.get(node.rank)) for node in nodes],
        "findings": [finding_record(finding) for finding in findings],
    }


def _node_record(node: NodeTarget, probed: ProbedNode | None) -> dict[str, Any]:
    declared = node.accelerators
    facts = probed.facts if probed else None
    accelerators = facts["accelerators"].get("found") if facts else None
    return {
        "rank": node.rank,
        "groups": list(node.groups),
        "host": node.host,
        "reached": probed is not None,
        "cores": facts["cores"] if facts else None,
        "memory_bytes": facts["memory"] if facts else None,
        "declared": {"per_node": declared.per_node, "model": declared.model} if declared else None,
        "found": {"type": accelerators["type"], "count": len(accelerators["models"]), "models": accelerators["models"]}
        if accelerators
        else None,
        "robots": [{"type": kind, **unit.model_dump(mode="json")} for kind, unit in node.robots],
    }
