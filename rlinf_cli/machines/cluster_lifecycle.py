"""Glue between the options of `up` and `down`, the cluster records, and the nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from rlinf_cli.bootstrap.phases import Phase
from rlinf_cli.console import console
from rlinf_cli.live.phase_table import PhaseTable

if TYPE_CHECKING:
    from rlinf_cli.bootstrap import startup, teardown
    from rlinf_cli.bootstrap.inventory import NodeTarget

T = TypeVar("T")


class Asked(NamedTuple):
    """The options of `up`."""

    file: str
    overrides: list[str] | None
    name: str | None
    node_rank: int | None
    head_address: str | None
    token_file: str | None
    timeout: float
    authenticated: bool
    sync: str | None


def prepare(asked: Asked) -> startup.UpRequest:
    """Return the request for bringing the cluster up.

    Raises:
        RLinfError: the file names no hosts for its nodes, or the options conflict.
    """
    from rlinf_cli.bootstrap import cluster_identity, manual, startup
    from rlinf_cli.bootstrap.inventory import targets
    from rlinf_cli.bootstrap.node import node_probe
    from rlinf_cli.bootstrap.transports import sync
    from rlinf_cli.file.job_file import load_sound
    from rlinf_core.node.cluster_records import section_digest
    from rlinf_core.node.own_process import refuse_stripped_docstrings

    refuse_stripped_docstrings()
    job = load_sound(asked.file, asked.overrides)
    cluster = job.cluster
    name = cluster_identity.cluster_name(asked.file, asked.name)
    nodes = targets(cluster)
    alone = manual.place(nodes, asked.node_rank, asked.head_address, os.environ)
    token = manual.shared_token(name, asked.token_file, alone, asked.timeout) if asked.authenticated else None
    archive = sync.archive(Path(asked.sync)) if asked.sync is not None else None
    return startup.UpRequest(
        name=name,
        file=asked.file,
        path=os.path.realpath(job.files[0]) if asked.file != "-" else "",
        section=section_digest(cluster),
        nodes=nodes if alone is None else manual.here(nodes),
        head_address=(alone.head_address if alone else None) or cluster.head_address,
        authenticated=asked.authenticated,
        only=alone.rank if alone else None,
        wait_head=alone is not None,
        token=token,
        fingerprint=None if archive else node_probe.software(dict(os.environ))["fingerprint"],
        archive=archive,
        start_seconds=asked.timeout,
    )


def watch(request: startup.UpRequest, *, parallel: int) -> startup.UpReport:
    """Bring the cluster up and show progress."""
    from rlinf_cli.bootstrap.startup import bring_up
    from rlinf_cli.bootstrap.transports.routes import NodeRoutes, run

    nodes = [node for node in request.nodes if request.only in (None, node.rank)]
    table = PhaseTable(nodes, Phase.VERIFY)

    async def work() -> startup.UpReport:
        return await _reminded(bring_up(request, NodeRoutes(parallel=parallel), table.update), table)

    with table.shown():
        return run(work())


def up_or_back(request: startup.UpRequest, *, parallel: int, rollback: bool) -> startup.UpReport:
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


def end(
    name: str, nodes: Sequence[NodeTarget], *, parallel: int, jobs: Sequence[teardown.RunningJob] = ()
) -> teardown.DownReport:
    """End the jobs, take the cluster down, and show progress."""
    from rlinf_cli.bootstrap.teardown import take_down
    from rlinf_cli.bootstrap.transports.routes import NodeRoutes, run

    table = PhaseTable(nodes, Phase.STOP)

    async def work() -> teardown.DownReport:
        return await _reminded(take_down(name, nodes, NodeRoutes(parallel=parallel), table.update, jobs=jobs), table)

    with table.shown():
        return run(work())


def jobs_of(name: str, nodes: Sequence[NodeTarget]) -> list[teardown.RunningJob]:
    """Return the jobs that run on a cluster."""
    from rlinf_cli.bootstrap.cluster_identity import cluster_id
    from rlinf_cli.bootstrap.teardown import running_jobs
    from rlinf_cli.bootstrap.transports.routes import NodeRoutes, run

    head = next((node for node in nodes if node.is_head), None)
    return run(running_jobs(cluster_id(name), head, NodeRoutes())) if head is not None else []


async def _reminded(work: Awaitable[T], table: PhaseTable) -> T:
    """Return the result of `work`; meanwhile refresh the table at intervals."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(1.0)
            table.remind()

    ticking = asyncio.ensure_future(tick())
    try:
        return await work
    finally:
        ticking.cancel()
