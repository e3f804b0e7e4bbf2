"""The reports of `up` and `down`, and the plan of `up --dry-run`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Any, Final

import typer

from rlinf_cli.cluster.down import DownReport, RunningJob
from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.progress import NodeFailure
from rlinf_cli.cluster.up import UpReport
from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.placement.job_layout import masked
from rlinf_core.errors import ClusterError
from rlinf_core.node import attach

UP_SCHEMA: Final = "rlinf.up/1"
PLAN_SCHEMA = "rlinf.up-plan/1"
DOWN_SCHEMA = "rlinf.down/1"
# Failures beyond these are only counted.
_MOST_FAILURES = 10
_LONGEST_COMMAND: Final = 100


def show_failures(failures: Sequence[NodeFailure]) -> None:
    """Print a block for each failed node: phase, cause, exit code, last lines, remedy."""
    shown = failures if console.verbosity.verbose else failures[:_MOST_FAILURES]
    for failure in shown:
        why = "\n".join(part for part in (failure.why, _spoken(failure)) if part)
        console.error_block(f"{failure.phase}: {failure.message}", where=failure.node, why=why, do=failure.help)
    if len(shown) < len(failures):
        console.error(f"and {len(failures) - len(shown)} more nodes failed; --verbose shows all of them")


def _spoken(failure: NodeFailure) -> str:
    """Return the exit code and the last lines, unless the cause already holds them."""
    code = f"exit code {failure.rc}" if failure.rc and f"exit code {failure.rc}" not in failure.why else ""
    lines = "" if failure.lines.strip() == failure.why.strip() else failure.lines.strip()
    return "\n".join(part for part in (code, f"last lines:\n{lines}" if lines else "") if part)


def up_result(report: UpReport) -> Result:
    """Print the nodes that failed, and return what `rlinf up` answers."""
    show_failures(report.failures)
    code = ExitCode.OK if report.ok else ExitCode.UNREACHABLE
    return Result(up_text(report), up_record(report), code)


def up_text(report: UpReport) -> str:
    """Return `cluster hetero18 is up: 18 nodes, head 10.0.0.1:20000 (3 started, 15 were up), 7.2 s`."""
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


def up_record(report: UpReport) -> dict[str, Any]:
    """Return the report as data."""
    return {
        "schema": UP_SCHEMA,
        "ok": report.ok,
        "cluster": report.name,
        "address": report.address or None,
        "seconds": round(report.seconds, 3),
        "nodes": [node._asdict() for node in report.nodes],
        "failures": failures_record(report.failures),
    }


def failures_record(failures: Sequence[NodeFailure]) -> list[dict[str, Any]]:
    """Failures as data."""
    return [
        {
            "rank": failure.rank,
            "node": failure.node,
            "phase": str(failure.phase),
            "message": failure.message,
            "why": failure.why or None,
            "help": failure.help or None,
            "exit_code": failure.rc,
            "last_lines": failure.lines or None,
        }
        for failure in failures
    ]


def down_result(report: DownReport) -> Result:
    """Print the nodes that failed, and return what `rlinf down` answers."""
    show_failures(report.failures)
    code = ExitCode.OK if report.ok else ExitCode.UNREACHABLE
    return Result(down_text(report), down_record(report), code)


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


def down_record(report: DownReport) -> dict[str, Any]:
    """Return the report as data."""
    return {
        "schema": DOWN_SCHEMA,
        "ok": report.ok,
        "cluster": report.name or None,
        "seconds": round(report.seconds, 3),
        "nodes": [node._asdict() for node in report.nodes],
        "failures": failures_record(report.failures),
    }


def plan_result(name: str, nodes: Sequence[NodeTarget], *, authenticated: bool) -> Result:
    """Return what `rlinf up --dry-run` answers."""
    return Result(
        plan_text(name, nodes, authenticated=authenticated), plan_record(name, nodes, authenticated=authenticated)
    )


def plan_text(name: str, nodes: Sequence[NodeTarget], *, authenticated: bool) -> str:
    """Return the planned actions for each node."""
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


def plan_record(name: str, nodes: Sequence[NodeTarget], *, authenticated: bool) -> dict[str, Any]:
    """Return the same as data."""
    return {
        "schema": PLAN_SCHEMA,
        "cluster": name,
        "authenticated": authenticated,
        "nodes": [
            {
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
            for node in nodes
        ],
    }


def _masked_env(node: NodeTarget) -> dict[str, str]:
    return {name: masked(name, value, ()) for name, value in node.env.items()}


def nothing_recorded(cluster: str | None) -> Result:
    """Return that there is no cluster to take down from here.

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
    return Result(text, down_record(DownReport(cluster or "", (), (), 0.0)))


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
    command = job.command.strip()
    shown = (command.splitlines() or [""])[0][:_LONGEST_COMMAND]
    return f"pid {job.pid} on {job.address}: {shown}{'' if shown == command else ' ...'}"
