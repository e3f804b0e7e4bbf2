"""`rlinf up` and `rlinf down`: from options and records to nodes, with the progress shown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlinf_cli.cluster import identity
from rlinf_cli.cluster.down import DownReport, RunningJob, running_jobs, take_down
from rlinf_cli.cluster.inventory import NodeTarget, here, place, recorded_targets, targets
from rlinf_cli.cluster.node import node_probe
from rlinf_cli.cluster.progress import Phase, PhaseTable
from rlinf_cli.cluster.transports import sync
from rlinf_cli.cluster.transports.transport import Transport, run
from rlinf_cli.cluster.up import UpReport, UpRequest, bring_up
from rlinf_cli.console import console
from rlinf_cli.job.job_file import load_sound
from rlinf_core.node import cluster_records
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
    alone = place(nodes, node_rank, head_address, os.environ)
    rank = alone.rank if alone else None
    token = identity.shared_token(name, token_file, rank, timeout) if authenticated else None
    archive = sync.archive(Path(code)) if code is not None else None
    return UpRequest(
        name=name,
        file=file,
        path=os.path.realpath(job.files[0]) if file != "-" else "",
        section=section_digest(cluster),
        nodes=nodes if alone is None else here(nodes),
        head_address=(alone.head_address if alone else None) or cluster.head_address,
        authenticated=authenticated,
        only=rank,
        wait_head=alone is not None,
        token=token,
        fingerprint=None if archive else node_probe.software(dict(os.environ))["fingerprint"],
        archive=archive,
        start_seconds=timeout,
    )


def watch(request: UpRequest, *, parallel: int) -> UpReport:
    """Bring the cluster up and show progress."""
    nodes = [node for node in request.nodes if request.only in (None, node.rank)]
    table = PhaseTable(nodes, Phase.VERIFY)

    async def work() -> UpReport:
        return await table.beside(bring_up(request, Transport(parallel=parallel), table.update))

    with table.shown():
        return run(work())


def up_or_back(request: UpRequest, *, parallel: int, rollback: bool) -> UpReport:
    """Bring the cluster up; with `rollback`, take the nodes that were started down again if one failed."""
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

    async def work() -> DownReport:
        return await table.beside(take_down(name, nodes, Transport(parallel=parallel), table.update, jobs=jobs))

    with table.shown():
        return run(work())


def jobs_of(name: str, node: NodeTarget) -> list[RunningJob]:
    """Return the jobs that run on a cluster, which one of its nodes asks the head for."""
    return run(running_jobs(identity.cluster_id(name), node, Transport()))


def nodes_to_end(file: str | None, name: str | None, node_rank: int | None) -> tuple[str | None, Sequence[NodeTarget]]:
    """Return the name of the cluster that `down` ends, and its nodes: from its record, else from the file."""
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
