"""`rlinf up` and `rlinf down`: requests from options and records, their execution with progress, and the results."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import typer

from rlinf_cli import console
from rlinf_cli.cluster import identity
from rlinf_cli.cluster.down import DownReport, RunningJob, running_jobs, take_down
from rlinf_cli.cluster.inventory import NodeTarget, here, place, recorded_targets, targets
from rlinf_cli.cluster.node import node_probe, node_requests
from rlinf_cli.cluster.progress import ClusterReport, NodeFailure, Phase, PhaseTable
from rlinf_cli.cluster.transport import Transport, run
from rlinf_cli.cluster.up import UpReport, UpRequest, bring_up
from rlinf_cli.command import Result
from rlinf_cli.interrupts import ExitCode
from rlinf_cli.job.job_file import load_sound
from rlinf_cli.job.job_layout import masked
from rlinf_core.errors import ClusterError
from rlinf_core.node import attach, cluster_records
from rlinf_core.node.cluster_records import section_digest
from rlinf_core.node.own_process import refuse_stripped_docstrings


def prepare(
    file: str,
    overrides: Sequence[str] | None = None,
    name: str | None = None,
    *,
    node_rank: int | None,
    head_address: str | None,
    token_file: str | None,
    timeout: float,
    authenticated: bool,
    code: str | None,
) -> UpRequest:
    """Return the request for bringing the cluster of a file up, from the options of `rlinf up`.

    Raises:
        RLinfError: the file names no hosts for its nodes, or the options conflict.
    """
    refuse_stripped_docstrings()
    job = load_sound(file, overrides)
    cluster = job.cluster
    name = identity.cluster_name(file, name)
    nodes = targets(cluster)
    rank, head_address = place(nodes, node_rank, head_address, os.environ, cluster.head_address)
    token = identity.shared_token(name, token_file, rank, timeout) if authenticated else None
    archive = node_requests.archive(Path(code)) if code is not None else None
    return UpRequest(
        name=name,
        file=file,
        path=os.path.realpath(job.files[0]) if file != "-" else "",
        section=section_digest(cluster),
        nodes=nodes if rank is None else here(nodes),
        head_address=head_address,
        authenticated=authenticated,
        only=rank,
        wait_head=rank is not None,
        token=token,
        fingerprint=None if archive else node_probe.software(dict(os.environ))["fingerprint"],
        archive=archive,
        start_seconds=timeout,
    )


def watch(request: UpRequest, *, parallel: int) -> UpReport:
    """Bring the cluster up and show progress."""
    nodes = [node for node in request.nodes if request.only in (None, node.rank)]
    table = PhaseTable(nodes, Phase.VERIFY)
    with table.shown():
        return run(table.beside(bring_up(request, Transport(parallel=parallel), table.update)))


def up_or_back(request: UpRequest, *, parallel: int, rollback: bool) -> UpReport:
    """Bring the cluster up; with `rollback`, take the started nodes down again if a node failed."""
    try:
        report = watch(request, parallel=parallel)
    except KeyboardInterrupt:
        console.message(f"interrupted: nodes that are up stay up until `rlinf down --name {request.name}`")
        raise
    if not report.ok and rollback:
        started = {node.rank for node in report.nodes if node.changed}
        console.message(f"taking down the nodes started by this run: {len(started)}")
        end(request.name, [node for node in request.nodes if node.rank in started], parallel=parallel)
    return report


def end(name: str, nodes: Sequence[NodeTarget], *, parallel: int, jobs: Sequence[RunningJob] = ()) -> DownReport:
    """End the jobs, take the cluster down, and show progress."""
    table = PhaseTable(nodes, Phase.STOP)
    with table.shown():
        return run(table.beside(take_down(name, nodes, Transport(parallel=parallel), table.update, jobs=jobs)))


def jobs_of(name: str, node: NodeTarget) -> list[RunningJob]:
    """Return the running jobs of a cluster, as its head tells the node `node`."""
    return run(running_jobs(identity.cluster_id(name), node, Transport()))


def nodes_to_end(file: str | None, name: str | None, node_rank: int | None) -> tuple[str | None, Sequence[NodeTarget]]:
    """Return the name and the nodes of the cluster that `down` ends, from its record, else from the file."""
    record = cluster_records.recorded(identity.cluster_name(file or "", name) if file or name else None)
    if record is not None and node_rank is None:
        started = {node.rank for node in record.nodes if node.folder is not None}
        return record.name, [node for node in recorded_targets(record) if node.rank in started]
    if file is None:
        return name, []
    nodes = targets(load_sound(file).cluster)
    cluster = identity.cluster_name(file, name)
    if node_rank is None:
        reachable = len(nodes) == 1 or nodes[0].host is not None
        return cluster, nodes if reachable else []
    return cluster, [node for node in here(nodes) if node.rank == node_rank]


UP_SCHEMA: Final = "rlinf.up/1"
PLAN_SCHEMA = "rlinf.up-plan/1"
DOWN_SCHEMA = "rlinf.down/1"
# Further failures are only counted.
_MOST_FAILURES = 10
_LONGEST_COMMAND: Final = 100


def _show_failures(failures: Sequence[NodeFailure]) -> None:
    """Print a block for each failed node: phase, cause, exit code, last lines, remedy."""
    shown = failures if console.verbosity.verbose else failures[:_MOST_FAILURES]
    for failure in shown:
        why = "\n".join(part for part in (failure.why, _spoken(failure)) if part)
        console.error_block(f"{failure.phase}: {failure.message}", where=failure.node, why=why, do=failure.help)
    if len(shown) < len(failures):
        console.error(f"and {len(failures) - len(shown)} more nodes failed; --verbose shows all of them")


def _spoken(failure: NodeFailure) -> str:
    """Return the exit code and the last lines of output, unless the cause already holds them."""
    named = f"exit code {failure.exit_code}"
    code = named if failure.exit_code and named not in failure.why else ""
    lines = "" if failure.last_lines.strip() == failure.why.strip() else failure.last_lines.strip()
    return "\n".join(part for part in (code, f"last lines:\n{lines}" if lines else "") if part)


def up_result(report: UpReport) -> Result:
    """Print the nodes that failed, and return the result of `rlinf up`."""
    return _answered(UP_SCHEMA, report, up_text(report), address=report.address or None)


def up_text(report: UpReport) -> str:
    """Return a line as `cluster hetero18 is up: 18 nodes, head 10.0.0.1:20000 (3 started, 15 were up), 7.2 s`."""
    ups = [node for node in report.nodes if node.up]
    started = sum(node.changed for node in ups)
    if report.ok and not started:
        how = "nothing to start"
    else:
        how = f"{started} started" + (f", {len(ups) - started} were up" if len(ups) > started else "")
    state = "is up" if report.ok else f"is incomplete: {len(ups)} of {len(report.nodes)} nodes are up"
    count = f": {len(ups)} node{'' if len(ups) == 1 else 's'}" if report.ok else ""
    head = f", head {report.address}" if report.address else ""
    return f"cluster {report.name} {state}{count}{head} ({how}), {report.seconds:.1f} s"


def down_result(report: DownReport) -> Result:
    """Print the nodes that failed, and return the result of `rlinf down`."""
    return _answered(DOWN_SCHEMA, report, down_text(report))


def _answered(schema: str, report: UpReport | DownReport, text: str, **place: str | None) -> Result:
    _show_failures(report.failures)
    record = {
        "schema": schema,
        "ok": report.ok,
        "cluster": report.name or None,
        **place,
        "seconds": round(report.seconds, 3),
        "nodes": [node._asdict() for node in report.nodes],
        "failures": [
            {name: None if value == "" else value for name, value in failure._asdict().items()}
            for failure in report.failures
        ],
    }
    return Result(text, record, ExitCode.OK if report.ok else ExitCode.UNREACHABLE)


def down_text(report: DownReport) -> str:
    """Return the outcome for all nodes, in one line."""
    present = sum(node.found for node in report.nodes)
    reached = sum(node.reached and not node.left for node in report.nodes)
    nodes = f"{len(report.nodes)} node{'' if len(report.nodes) == 1 else 's'}"
    if report.ok and not present:
        return f"cluster {report.name}: found nothing on {nodes}, {report.seconds:.1f} s"
    if report.ok:
        return (
            f"cluster {report.name} is down: no process, port, file or shared memory left on {nodes},"
            f" {report.seconds:.1f} s"
        )
    return f"cluster {report.name} is not fully down: {reached} of {nodes} are clean, {report.seconds:.1f} s"


def plan_result(name: str, nodes: Sequence[NodeTarget], *, authenticated: bool) -> Result:
    """Return the result of `rlinf up --dry-run`: the planned settings of each node."""
    record = {
        "schema": PLAN_SCHEMA,
        "cluster": name,
        "authenticated": authenticated,
        "nodes": list(map(_planned, nodes)),
    }
    return Result(_plan_text(name, nodes, authenticated=authenticated), record)


def _plan_text(name: str, nodes: Sequence[NodeTarget], *, authenticated: bool) -> str:
    blocks = [f"cluster {name}: {len(nodes)} node{'' if len(nodes) == 1 else 's'}, no connection made"]
    for node in nodes:
        role = "head" if node.is_head else "joins node 0"
        fixed = node.ports.fixed(head=node.is_head)
        way = "this machine" if node.host is None else "ssh " + shlex.quote(node.host)
        lines = [
            f"node {node.rank}  {way}  {role}",
            f"  interpreter  {node.interpreter}" + ("" if node.declared_interpreter else "  (as here)"),
            f"  labels       {', '.join(f'{key}={value}' for key, value in node.labels.items())}",
            f"  ports        {min(fixed.values())}-{max(fixed.values())},"
            f" workers {node.ports.first_worker}-{node.ports.last_worker}, rlinf's own {node.ports.data}",
            *(f"  variable     {key}={value}" for key, value in _masked_env(node).items()),
        ]
        blocks.append("\n".join(lines))
    blocks.append("authentication: " + ("a token made for this cluster" if authenticated else "none"))
    return "\n\n".join(blocks)


def _planned(node: NodeTarget) -> dict[str, Any]:
    return {
        "rank": node.rank,
        "host": node.host,
        "groups": list(node.groups),
        "head": node.is_head,
        "interpreter": node.interpreter,
        "labels": node.labels,
        "ports": node.ports.fixed(head=node.is_head),
        "worker_ports": [node.ports.first_worker, node.ports.last_worker],
        "data_ports": [node.ports.first_data, node.ports.last_data],
        "env": _masked_env(node),
    }


def _masked_env(node: NodeTarget) -> dict[str, str]:
    return {name: masked(name, value, ()) for name, value in node.env.items()}


def nothing_recorded(cluster: str | None) -> Result:
    """Return the result of `rlinf down` if there is no cluster to take down from here.

    Raises:
        ClusterError: a node started with `--node-rank` runs here.
    """
    here = attach.known()
    if here is not None and cluster in (None, here.name):
        raise ClusterError(
            f"a node of cluster `{here.name}` runs here, started with `--node-rank`",
            why="the record of the cluster is on the machine of node 0",
            help="take it down with `rlinf down FILE --node-rank K`",
        )
    text = "no cluster is up" if cluster is None else f"cluster {cluster} is not up"
    return _answered(DOWN_SCHEMA, ClusterReport(cluster or "", (), (), 0.0), text)


def agreed(cluster: str, jobs: list[str]) -> bool:
    """Ask whether to end running jobs, if there is a terminal."""
    console.error_block(
        f"{len(jobs)} job{'s' if len(jobs) > 1 else ''} running on cluster {cluster}",
        why="\n".join(jobs),
        do="end it first, or add --force",
    )
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    return typer.confirm("take the cluster down anyway?", err=True)


def job_line(job: RunningJob) -> str:
    """Return a job in one line."""
    command = job.shown.strip()
    shown = (command.splitlines() or [""])[0][:_LONGEST_COMMAND]
    return f"pid {job.pid} on {job.address}: {shown}{'' if shown == command else ' ...'}"
