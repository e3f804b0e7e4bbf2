"""`rlinf down`: take a cluster down, and verify that nothing is left."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments.cluster_options import FileIfAny, NameOption, Parallel
from rlinf_cli.arguments.options import Output, OutputOption, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.lazy import command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlinf_cli.bootstrap.inventory import NodeTarget


def down(
    file: FileIfAny = None,
    name: NameOption = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            "--node-rank", metavar="K", help="Take down this machine alone, node K.", min=0, show_default=False
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Even while a job runs, without asking.", show_default=False)
    ] = False,
    parallel: Parallel = 128,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Take down the cluster that `up` started, and verify it node by node.

    By default the only running cluster. With FILE no record of it is needed: every node of the file is probed. A Ray
    that `up` did not start is left alone.
    """
    from rlinf_cli.machines.cluster_lifecycle import end, jobs_of
    from rlinf_cli.render.up_report import down_record, down_text, show_failures

    if node_rank is not None and file is None:
        raise typer.BadParameter("it requires FILE, in which this machine is node K", param_hint="'--node-rank'")
    cluster, nodes = _nodes(file, name, node_rank)
    if cluster is None or not nodes:
        _nothing_recorded(cluster, output)
        return
    jobs = jobs_of(cluster, nodes)
    listed = [f"pid {job.pid} on {job.address}: {_first_line(job.command)}" for job in jobs]
    if jobs and not force and not _agreed(cluster, listed):
        raise typer.Exit(ExitCode.FAILED)
    for job in listed:
        console.message(f"ending {job}")
    report = end(cluster, nodes, parallel=parallel, jobs=jobs)
    show_failures(report.failures)
    if output is Output.JSON:
        console.result_json(down_record(report))
    else:
        console.result(down_text(report))
    if not report.ok:
        raise typer.Exit(ExitCode.UNREACHABLE)


app = command(down, examples=("rlinf down", "rlinf down cluster.yaml"))


def _nothing_recorded(cluster: str | None, output: Output) -> None:
    """Report that there is no cluster to take down from here.

    Raises:
        ClusterError: a node started with `--node-rank` runs here.
    """
    from rlinf_cli.bootstrap.teardown import DownReport
    from rlinf_cli.render.up_report import down_record
    from rlinf_core.errors import ClusterError
    from rlinf_core.node import attach

    here = attach.known()
    if here is not None and cluster in (None, here.name):
        raise ClusterError(
            f"a node of cluster `{here.name}` runs here, started with `--node-rank`",
            why="the record of the cluster is on the machine of node 0",
            help="take it down with `rlinf down FILE --node-rank K`",
        )
    if output is Output.JSON:
        console.result_json(down_record(DownReport(cluster or "", (), (), 0.0)))
    else:
        console.result("no cluster is up" if cluster is None else f"cluster {cluster} is not up")


def _nodes(file: str | None, name: str | None, node_rank: int | None) -> tuple[str | None, Sequence[NodeTarget]]:
    """Return the cluster's name and its nodes: from its record, else from the file."""
    from rlinf_cli.bootstrap import cluster_identity, manual
    from rlinf_cli.bootstrap.inventory import recorded_targets, targets
    from rlinf_core.node import cluster_records

    record = cluster_records.recorded(cluster_identity.cluster_name(file or "", name) if file or name else None)
    if record is not None and node_rank is None:
        started = {node.rank for node in record.nodes if node.folder is not None}
        return record.name, [node for node in recorded_targets(record) if node.rank in started]
    if file is None:
        return name, []
    from rlinf_cli.file.job_file import load_sound

    nodes = targets(load_sound(file).cluster)
    cluster = cluster_identity.cluster_name(file, name)
    if node_rank is None:
        reachable = len(nodes) == 1 or nodes[0].host is not None
        return cluster, nodes if reachable else []
    return cluster, [node for node in manual.here(nodes) if node.rank == node_rank]


def _agreed(cluster: str, jobs: list[str]) -> bool:
    """Ask whether to end running jobs, if there is a terminal."""
    console.error_block(
        f"{len(jobs)} job{'s' if len(jobs) > 1 else ''} running on cluster {cluster}",
        why="\n".join(jobs),
        do="end it first, or add --force",
    )
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    return typer.confirm("take the cluster down anyway?", err=True)


def _first_line(command: str) -> str:
    lines = command.strip().splitlines() or [""]
    shown = lines[0][:100]
    return shown if shown == command.strip() else f"{shown} ..."
