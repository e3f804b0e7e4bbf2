"""Nodes that start themselves and all see one home, as under Slurm: none keeps another waiting or from ending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlinf_cli.cluster import identity
from rlinf_cli.cluster.down import take_down
from rlinf_cli.cluster.inventory import NodeTarget, here
from rlinf_cli.cluster.up import UpReport, UpRequest, bring_up
from rlinf_core.node import cluster_records
from tests.unit.cli.cluster.conftest import CODE, FakeCluster

Nodes = Callable[..., tuple[NodeTarget, ...]]


def test_nodes_come_up_and_end_while_the_head_is_at_work(make_nodes: Nodes) -> None:
    nodes = here(make_nodes(3))
    fake = FakeCluster(3)

    def up(rank: int) -> UpReport:
        request = UpRequest("c", "c.yaml", nodes, "10.0.0.1", only=rank, token="t" * 64, fingerprint=CODE)
        return asyncio.run(bring_up(request, fake, lambda _: None))

    assert up(0).ok
    # As while `up` or `down` of the head is at work on another machine, whose locks reach as far as the home.
    with identity.locked("c"):
        assert up(1).ok
        assert up(2).ok
        before = cluster_records.load("c")
        ended = asyncio.run(take_down("c", nodes[1:2], fake, lambda _: None))
    assert ended.ok
    assert cluster_records.load("c") == before
    asyncio.run(take_down("c", nodes[:1], fake, lambda _: None))
    assert cluster_records.load("c") is None
