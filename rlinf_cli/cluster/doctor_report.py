"""The results of `rlinf doctor` and `rlinf inspect hardware`, as tables and as data."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rlinf_cli import console
from rlinf_cli.cluster import doctor, identity
from rlinf_cli.cluster.checks import (
    FAULT,
    OK,
    WARNING,
    CheckVerdict,
    Finding,
    ProbedNode,
    figures,
    found_text,
    judged,
    merged,
    size,
)
from rlinf_cli.cluster.doctor import DoctorReport
from rlinf_cli.cluster.inventory import NodeTarget, reachable, recorded_cluster, recorded_targets
from rlinf_cli.cluster.node import node_probe
from rlinf_cli.cluster.transport import Transport, run
from rlinf_cli.command import Result
from rlinf_cli.console import shown
from rlinf_cli.interrupts import ExitCode
from rlinf_cli.job.job_file import SoundJob, load_sound
from rlinf_cli.runs.run_lookup import all_runs
from rlinf_core.errors import RunError
from rlinf_core.job.find_recipe import recipe_of
from rlinf_core.node import cluster_records
from rlinf_core.runners.storage.first_contact import FILE, comparisons_text, read_comparisons

SCHEMA: Final = "rlinf.doctor/1"
HARDWARE_SCHEMA: Final = "rlinf.hardware/1"
# More good links than this are summarized in one line.
_MOST_LINKS: Final = 8
_DISTRIBUTION: Final = "rlinf-cli"
_WRONG: Final = (FAULT, CheckVerdict.UNREACHABLE)


def examined(file: str, overrides: list[str] | None, name: str | None, *, link_seconds: float, parallel: int) -> Result:
    """Run the preflight checks on a file's machines, and return the result of `rlinf doctor`.

    Raises:
        ConfigError: the file has several nodes but no hosts.
    """
    job = load_sound(file, overrides)
    nodes = reachable(job.cluster)
    recipe = getattr(job.model, "recipe", None)
    own = recipe_of(job.model) if recipe else None
    trials = own.load(own.trials) if own is not None else None
    cluster, environ = identity.cluster_name(file, name), dict(os.environ)
    request = doctor.DoctorRequest(
        cluster=job.cluster,
        nodes=nodes,
        cluster_id=identity.cluster_id(cluster),
        here=node_probe.software(environ, packages=_packages()),
        recipe=recipe,
        own_recipe=node_probe.recipe_of(recipe, environ) if recipe else None,
        recorded=cluster_records.load(cluster),
        link_seconds=link_seconds,
        # Measuring a link takes a connection to each of its ends.
        links_at_once=max(1, parallel // 2),
        trials=tuple(trials(job.model)) if trials is not None else (),
    )
    report = run(doctor.examine(request, Transport(parallel=max(2, parallel)), console.message))
    return doctor_result(report._replace(findings=(*report.findings, *_first_contact(job, recipe))))


def _packages() -> list[str]:
    """Return the packages that rlinf and its extras require; none if rlinf is not installed."""
    try:
        required = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    return sorted({re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] for requirement in required})


def _first_contact(job: SoundJob, recipe: str | None) -> list[Finding]:
    """Return a finding about the start-up checks of the experiment's newest run; none without such a run."""
    logger = getattr(getattr(job.model, "runner", None), "logger", None)
    # The same default as in `RunFolder.create`.
    experiment = str(getattr(logger, "experiment_name", None) or recipe or "")
    try:
        folders = all_runs(Path(getattr(logger, "log_path", "runs")))
    except RunError as error:
        return [Finding("first contact", WARNING, f"{error.message}: {error.where}: {error.why}", where="run")]
    runs = [folder for folder in folders if folder.state.experiment == experiment]
    for folder in sorted(runs, key=lambda folder: folder.state.created, reverse=True):
        if checks := read_comparisons(folder.path):
            differing = [f"{check.what} against {check.with_}" for check in checks if check.verdict == "differs"]
            what = f"checks of the newest run: {comparisons_text(checks)} (`{shown(folder.path)}/{FILE}`)"
            data = {"run": str(folder.path), "seconds": sum(check.seconds or 0.0 for check in checks)}
            if not differing:
                return [Finding("first contact", OK, what, where="run", data=data)]
            what = f"{what}; these differ: {'; '.join(differing)}"
            help = f"look at `rlinf why {shlex.quote(shown(folder.path))}`"
            return [Finding("first contact", WARNING, what, where="run", help=help, data=data)]
    return []


def doctor_result(report: DoctorReport) -> Result:
    """Return the result of `rlinf doctor`."""
    code = ExitCode.OK if report.ok else ExitCode.FAILED
    return Result(
        lambda: doctor_text(report, every_node=console.verbosity.verbose),
        lambda: doctor_record(report),
        code if report.reached else ExitCode.UNREACHABLE,
    )


def doctor_text(report: DoctorReport, *, every_node: bool = False) -> str:
    """Return the table and a summary.

    Args:
        every_node: whether each of several nodes with equal findings has its own line.
    """
    findings = report.findings if every_node else merged(_short(report.findings))
    rows = [(str(finding.verdict), finding.check, finding.where, finding.what, finding.help) for finding in findings]
    headers = ("verdict", "check", "where", "what", "do")
    if not any(help for *_, help in rows):
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    shown = console.table(headers, rows, keep=(0, 1))
    return f"{shown}\n\n{_summary(report)}"


def _short(findings: Sequence[Finding]) -> list[Finding]:
    fine = [finding for finding in findings if finding.check == "link" and finding.verdict is OK]
    if len(fine) <= _MOST_LINKS:
        return list(findings)
    ranges = figures(
        [finding.data["latency_seconds"] for finding in fine], [finding.data["bytes_per_second"] for finding in fine]
    )
    line = Finding("link", OK, f"{len(fine)} links: {ranges}", data={"links": len(fine)})
    first = fine[0]
    return [line if finding is first else finding for finding in findings if finding is first or finding not in fine]


def _summary(report: DoctorReport) -> str:
    nodes = f"{report.num_reached} of {report.num_nodes} node{'' if report.num_nodes == 1 else 's'} asked"
    counted = [
        (report.count(FAULT), "fault", "faults"),
        (report.count(CheckVerdict.UNREACHABLE), "node not reached", "nodes not reached"),
        (report.count(WARNING), "warning", "warnings"),
        (report.count(CheckVerdict.SKIPPED), "not checked", "not checked"),
    ]
    listed = ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in counted if count)
    return f"{nodes}: {listed or 'all checks passed'}, {report.seconds:.1f} s"


def doctor_record(report: DoctorReport) -> dict[str, Any]:
    """Return the report as data."""
    return {
        "schema": SCHEMA,
        "ok": report.ok,
        "nodes": report.num_nodes,
        "reached": report.num_reached,
        "seconds": round(report.seconds, 3),
        "findings": [finding_record(finding) for finding in report.findings],
    }


def finding_record(finding: Finding) -> dict[str, Any]:
    """Return a finding as data."""
    return {**finding._asdict(), "help": finding.help or None, "data": dict(finding.data)}


def hardware_of(file: str | None, overrides: list[str] | None, name: str | None, *, parallel: int) -> Result:
    """Return the result of `rlinf inspect hardware` for a file's nodes, or for the running cluster's nodes.

    Raises:
        ClusterError: no file is given, and no cluster is up.
    """
    if file is not None:
        cluster, nodes = identity.cluster_name(file, name), reachable(load_sound(file, overrides).cluster)
    else:
        record = recorded_cluster(name)
        cluster, nodes = record.name, recorded_targets(record)
    transport = Transport(parallel=parallel)
    probed, unanswered = run(doctor.look_at(nodes, identity.cluster_id(cluster), transport, console.message))
    findings = [*unanswered, *judged(probed)]
    verdicts = {finding.verdict for finding in findings}
    code = ExitCode.FAILED if FAULT in verdicts else ExitCode.OK
    return Result(
        lambda: hardware_text(nodes, probed, findings),
        lambda: hardware_record(nodes, probed, findings),
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
    """Return the hardware of the nodes, and the findings about it, as data."""
    by_rank = {machine.node.rank: machine for machine in probed}
    return {
        "schema": HARDWARE_SCHEMA,
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
