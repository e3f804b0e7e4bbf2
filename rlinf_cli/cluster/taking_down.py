"""The nodes that `rlinf down` takes down, and what it says before it does."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from rlinf_cli.cluster import by_hand, identity
from rlinf_cli.cluster.down import DownReport
from rlinf_cli.cluster.inventory import recorded_targets, targets
from rlinf_cli.cluster.up_report import down_record
from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_core.errors import ClusterError
from rlinf_core.node import attach, cluster_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlinf_cli.cluster.down import RunningJob
    from rlinf_cli.cluster.inventory import NodeTarget

_LONGEST_COMMAND = 100


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


def nodes_of(file: str | None, name: str | None, node_rank: int | None) -> tuple[str | None, Sequence[NodeTarget]]:
    """Return the cluster's name and its nodes: from its record, else from the file."""
    record = cluster_records.recorded(identity.cluster_name(file or "", name) if file or name else None)
    if record is not None and node_rank is None:
        started = {node.rank for node in record.nodes if node.folder is not None}
        return record.name, [node for node in recorded_targets(record) if node.rank in started]
    if file is None:
        return name, []
    from rlinf_cli.file.job_file import load_sound

    nodes = targets(load_sound(file).cluster)
    cluster = identity.cluster_name(file, name)
    if node_rank is None:
        reachable = len(nodes) == 1 or nodes[0].host is not None
        return cluster, nodes if reachable else []
    return cluster, [node for node in by_hand.here(nodes) if node.rank == node_rank]


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
