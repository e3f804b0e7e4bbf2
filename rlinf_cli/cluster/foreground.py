"""`rlinf up --block`: nodes that live as long as the command."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

import typer

from rlinf_cli.cluster.guardian import Guardian
from rlinf_cli.cluster.identity import cluster_id
from rlinf_cli.cluster.lifecycle import end, watch
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_core.node.node_facts import folder_of, read_record
from rlinf_core.process.proc import alive

if TYPE_CHECKING:
    from rlinf_cli.cluster.inventory import NodeTarget
    from rlinf_cli.cluster.up import UpReport, UpRequest

# Seconds for running jobs to save and end when SIGTERM asks the nodes to end. Schedulers ask the driver at the same
# time, and kill what is left 30 s later by default.
_JOBS_SECONDS: Final = 15.0
_PAUSE: Final = 1.0


def hold(request: UpRequest, show: Callable[[UpReport], None], *, parallel: int) -> None:
    """Bring the nodes up, wait until Ray ends or this process is stopped, and take down what this command started.

    On this machine a guardian takes the node down if this process is killed.

    Raises:
        typer.Exit: the nodes did not come up, or Ray ended on its own.
    """
    nodes = [node for node in request.nodes if request.only in (None, node.rank)]
    local = len(nodes) == 1 and nodes[0].host is None
    fresh = local and not _runs_here(request.name)
    ours = nodes if fresh else []
    with Guardian(request.name, nodes[0].rank) if fresh else nullcontext() as guardian:
        try:
            report = watch(request, parallel=parallel)
            show(report)
            if not report.ok:
                changed = {node.rank for node in report.nodes if node.changed}
                ours = ours or [node for node in nodes if node.rank in changed]
                raise typer.Exit(ExitCode.UNREACHABLE)
            ours = nodes
            console.message(f"{report.name}: {'this node runs' if local else 'the nodes run'} until stopped")
            while not local or _runs_here(request.name):
                time.sleep(_PAUSE)
        except SystemExit as error:
            # Asked again, by Slurm for one, it ends no sooner.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if error.code == ExitCode.TERMINATED and ours:
                _wait_for_jobs(request.name, ours)
            raise
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if ours and end(request.name, ours, parallel=parallel).ok and guardian is not None:
                guardian.dismiss()
    console.error_block("Ray ended on this node", why="it was stopped, or its head ended")
    raise typer.Exit(ExitCode.FAILED)


def _runs_here(name: str) -> bool:
    record = read_record(folder_of(cluster_id(name)))
    return record is not None and alive(record.get("process"))


def _wait_for_jobs(name: str, nodes: Sequence[NodeTarget]) -> None:
    """Wait until no driver is connected to the cluster: a driver that saves needs all of its nodes."""
    from rlinf_cli.cluster.down import running_jobs
    from rlinf_cli.cluster.transports.routes import NodeRoutes, run

    until = time.monotonic() + _JOBS_SECONDS
    while run(running_jobs(cluster_id(name), nodes[0], NodeRoutes())) and time.monotonic() < until:
        time.sleep(_PAUSE)
