"""The state of a cluster's nodes and jobs, as text and as data."""

from __future__ import annotations

import time
from typing import Any

from rlinf_cli.cluster.down import RunningJob
from rlinf_cli.cluster.status import NodeStatus, State, StatusReport
from rlinf_cli.console import console

SCHEMA = "rlinf.status/1"


def status_text(report: StatusReport) -> str:
    """Return the nodes, then problems of nodes that are not up, then the jobs."""
    ups = sum(node.state is State.UP for node in report.nodes)
    count = f"{len(report.nodes)} node{'' if len(report.nodes) == 1 else 's'}"
    if report.name is None:
        title = f"a cluster not started by `rlinf up`: {count}"
    else:
        title = f"cluster {report.name}: {ups} of {count} {'is' if len(report.nodes) == 1 else 'are'} up"
    title += f", head {report.address}" if report.address else ""
    title += ", no authentication" if report.authenticated is False else ""
    rows = [_row(node) for node in report.nodes]
    headers = ("node", "group", "host", "state", "address", "python", "ray", "rlinf")
    blocks = [title, console.table(headers, rows, right=(0,))]
    troubles = [_trouble(node) for node in report.nodes if node.state is not State.UP]
    if troubles:
        blocks.append("\n".join(troubles))
    blocks.append(_jobs(report.jobs))
    return "\n\n".join(blocks)


def _row(node: NodeStatus) -> tuple[str, ...]:
    host = _host(node)
    versions = tuple(version or "-" for version in (node.python, node.ray, node.rlinf))
    return (str(node.rank), ", ".join(node.groups) or "-", host, str(node.state), node.address or "-", *versions)


def _host(node: NodeStatus) -> str:
    # A node without a host was started on its own machine; only the head's is this one.
    return node.host or ("this machine" if node.rank == 0 else "started there")


def _trouble(node: NodeStatus) -> str:
    line = f"node {node.rank} ({_host(node)}): {node.detail}"
    return f"{line}\n  do: {node.help}" if node.help else line


def _jobs(jobs: tuple[RunningJob, ...] | None) -> str:
    if jobs is None:
        return "jobs: unknown, the head did not answer"
    if not jobs:
        return "jobs: none"
    rows = [(str(job.pid), job.address, _since(job.since), job.command) for job in jobs]
    return "jobs\n" + console.table(("pid", "node", "since", "command"), rows, right=(0,))


def _since(started: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))


def status_record(report: StatusReport) -> dict[str, Any]:
    """Return the same as data."""
    return {
        "schema": SCHEMA,
        "cluster": report.name,
        "whole": report.all_up,
        "file": report.file,
        "address": report.address or None,
        "authenticated": report.authenticated,
        "seconds": round(report.seconds, 3),
        "nodes": [
            {
                "rank": node.rank,
                "groups": list(node.groups),
                "host": node.host,
                "state": str(node.state),
                "address": node.address,
                "python": node.python,
                "ray": node.ray,
                "rlinf": node.rlinf,
                "detail": node.detail or None,
                "help": node.help or None,
            }
            for node in report.nodes
        ],
        "jobs": None
        if report.jobs is None
        else [
            {"pid": job.pid, "address": job.address, "started": job.since, "command": job.command}
            for job in report.jobs
        ],
    }
