"""Glue between the options of `up` and `down`, the cluster records, and the nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from rlinf_cli.cluster.phase_table import PhaseTable
from rlinf_cli.cluster.phases import Phase
from rlinf_cli.console import console

if TYPE_CHECKING:
    from rlinf_cli.cluster import down, up
    from rlinf_cli.cluster.inventory import NodeTarget

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


def prepare(asked: Asked) -> up.UpRequest:
    """Return the request for bringing the cluster up.

    Raises:
        RLinfError: the file names no hosts for its nodes, or the options conflict.
    """
    from rlinf_cli.cluster import by_hand, identity, up
    from rlinf_cli.cluster.inventory import targets
    from rlinf_cli.cluster.node import node_probe
    from rlinf_cli.cluster.transports import sync
    from rlinf_cli.file.job_file import load_sound
    from rlinf_core.node.cluster_records import section_digest
    from rlinf_core.node.own_process import refuse_stripped_docstrings

    refuse_stripped_docstrings()
    job = load_sound(asked.file, asked.overrides)
    cluster = job.cluster
    name = identity.cluster_name(asked.file, asked.name)
    nodes = targets(cluster)
    alone = by_hand.place(nodes, asked.node_rank, asked.head_address, os.environ)
    token = by_hand.shared_token(name, asked.token_file, alone, asked.timeout) if asked.authenticated else None
    archive = sync.archive(Path(asked.sync)) if asked.sync is not None else None
    return up.UpRequest(
        name=name,
        file=asked.file,
        path=os.path.realpath(job.files[0]) if asked.file != "-" else "",
        section=section_digest(cluster),
        nodes=nodes if alone is None else by_hand.here(nodes),
        head_address=(alone.head_address if alone else None) or cluster.head_address,
        authenticated=asked.authenticated,
        only=alone.rank if alone else None,
        wait_head=alone is not None,
        token=token,
        fingerprint=None if archive else node_probe.software(dict(os.environ))["fingerprint"],
        archive=archive,
        start_seconds=asked.timeout,
    )


def watch(request: up.UpRequest, *, parallel: int) -> up.UpReport:
    """Bring the cluster up and show progress."""
    from rlinf_cli.cluster.transports.routes import NodeRoutes, run
    from rlinf_cli.cluster.up import bring_up

    nodes = [node for node in request.nodes if request.only in (None, node.rank)]
    table = PhaseTable(nodes, Phase.VERIFY)

    async def work() -> up.UpReport:
        return await _reminded(bring_up(request, NodeRoutes(parallel=parallel), table.update), table)

    with table.shown():
        return run(work())


def up_or_back(request: up.UpRequest, *, parallel: int, rollback: bool) -> up.UpReport:
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
    name: str, nodes: Sequence[NodeTarget], *, parallel: int, jobs: Sequence[down.RunningJob] = ()
) -> down.DownReport:
    """End the jobs, take the cluster down, and show progress."""
    from rlinf_cli.cluster.down import take_down
    from rlinf_cli.cluster.transports.routes import NodeRoutes, run

    table = PhaseTable(nodes, Phase.STOP)

    async def work() -> down.DownReport:
        return await _reminded(take_down(name, nodes, NodeRoutes(parallel=parallel), table.update, jobs=jobs), table)

    with table.shown():
        return run(work())


def jobs_of(name: str, nodes: Sequence[NodeTarget]) -> list[down.RunningJob]:
    """Return the jobs that run on a cluster."""
    from rlinf_cli.cluster.down import running_jobs
    from rlinf_cli.cluster.identity import cluster_id
    from rlinf_cli.cluster.transports.routes import NodeRoutes, run

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
