"""`down` over simulated nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rlinf_cli.cluster.down import DownReport, running_jobs, take_down
from rlinf_cli.cluster.inventory import NodeTarget, recorded_targets
from rlinf_cli.cluster.progress import Event, Phase
from rlinf_cli.cluster.transports.transport import CommandOutcome
from rlinf_cli.cluster.up import UpRequest, bring_up
from rlinf_core.node import cluster_records
from tests.unit.cli.cluster.conftest import CODE, FakeCluster

Nodes = Callable[..., tuple[NodeTarget, ...]]


class Site:
    """A cluster of three that is up."""

    def __init__(self, nodes: tuple[NodeTarget, ...]) -> None:
        self.nodes = nodes
        self.fake = FakeCluster(3)
        asyncio.run(bring_up(UpRequest("c", "c.yaml", nodes, fingerprint=CODE), self.fake, self.quiet))
        self.fake.log.clear()

    def quiet(self, event: Event) -> None:
        pass

    def down(self) -> DownReport:
        record = cluster_records.recorded("c")
        nodes = recorded_targets(record) if record else self.nodes
        return asyncio.run(take_down("c", nodes, self.fake, self.quiet))


@pytest.fixture
def site(make_nodes: Nodes) -> Site:
    return Site(make_nodes(3))


def test_all_go_the_head_last_and_nothing_is_remembered(site: Site) -> None:
    report = site.down()
    assert report.ok
    assert all(node.found and node.reached and not node.left for node in report.nodes)
    assert site.fake.log[-1] == (0, "stop")
    assert cluster_records.recorded("c") is None
    assert not cluster_records.token_file("c").exists()


def test_twice_finds_nothing(site: Site) -> None:
    site.down()
    report = site.down()
    assert report.ok
    assert not any(node.found for node in report.nodes)


def test_a_node_that_is_not_reached_stays_recorded(site: Site) -> None:
    site.fake.nodes[2].ssh = CommandOutcome.UNREACHABLE
    report = site.down()
    [failure] = report.failures
    assert (failure.rank, failure.phase, failure.message) == (2, Phase.STOP, "unreachable")
    record = cluster_records.recorded("c")
    assert record is not None
    assert [node.folder is not None for node in record.nodes] == [False, False, True]
    site.fake.nodes[2].ssh = None
    assert site.down().ok
    assert cluster_records.recorded("c") is None


def test_what_is_left_is_told(site: Site) -> None:
    site.fake.nodes[1].left = ["pid 7, `raylet`"]
    report = site.down()
    [failure] = report.failures
    assert failure.why == "process pid 7, `raylet`"
    assert report.nodes[1].left == ("process pid 7, `raylet`",)
    assert cluster_records.recorded("c") is not None


def test_jobs_are_the_heads_to_tell(site: Site) -> None:
    site.fake.jobs = [{"address": "10.0.0.1", "pid": 42, "command": "python train.py", "started": 1.0, "id": "01"}]
    jobs = asyncio.run(running_jobs("c", site.nodes[0], site.fake))
    assert [(job.pid, job.command) for job in jobs] == [(42, "python train.py")]
    record: Any = site.fake.nodes[0].record
    record["alive"] = False
    assert asyncio.run(running_jobs("c", site.nodes[0], site.fake)) == []
