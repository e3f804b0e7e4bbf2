"""Groups whose processes are forked from one that has imported their module."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.config.machines.cluster import ClusterConfig
from rlinf_core.failures import WorkerGroupError
from rlinf_core.placement.flexible import FlexiblePlacementStrategy
from rlinf_core.placement.node import NodePlacementStrategy
from rlinf_core.worker.launch import WAVE
from rlinf_core.worker.worker import Worker


class Light(Worker):
    forked = True

    def parent(self) -> int:
        return os.getppid()

    def drawn(self) -> tuple[float, float]:
        return random.random(), float(np.random.rand())

    def variables(self) -> tuple[str, str | None]:
        return os.environ["RANK"], os.environ.get("MARK")

    def pass_on(self, channel: str) -> int:
        """Send a value around the group, and put what came into a channel."""
        sent = self.send(self._rank, "light", (self._rank + 1) % self._world_size, async_op=True)
        came = self.recv("light", (self._rank - 1) % self._world_size)
        sent.wait()
        self.connect_channel(channel).put(came)
        return came

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def parent_of_a_child(self) -> int:
        with Light.create_group().launch(Cluster(), NodePlacementStrategy([0]), name="light-child") as child:
            (parent,) = child.parent().wait()
        return parent


def test_processes_of_a_node_share_one_parent_and_draw_apart(cluster: Cluster) -> None:
    with Light.create_group().launch(cluster, NodePlacementStrategy([0, 0, 0]), name="light") as group:
        parents = set(group.parent().wait())
        assert len(parents) == 1
        assert b"fork_server" in Path(f"/proc/{parents.pop()}/cmdline").read_bytes()
        python, numpy = zip(*group.drawn().wait(), strict=True)
        assert len(set(python)) == len(set(numpy)) == 3
        channel = Channel.create("light-values")
        assert group.pass_on("light-values").wait() == [2, 0, 1]
        assert sorted(channel.get() for _ in range(3)) == [0, 1, 2]
        channel.close()


def test_the_death_of_one_is_told_and_another_group_can_follow(cluster: Cluster) -> None:
    with Light.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="light") as group:
        with pytest.raises(WorkerGroupError, match=r"`light:1` on node 0.*\n.*it was killed"):
            group.execute_on(1).end().wait(timeout=60)
        assert len(group.execute_on(0).parent().wait()) == 1
    with Light.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="light") as group:
        assert len(set(group.parent().wait())) == 1


def test_the_environment_of_a_node_group_reaches_them(cluster: Cluster) -> None:
    given = {"label": "agents", "node_ranks": "0", "env_configs": [{"node_ranks": "0", "env_vars": [{"MARK": "$1"}]}]}
    configured = Cluster(cluster_cfg=ClusterConfig.model_validate({"num_nodes": 1, "node_groups": [given]}))
    strategy = FlexiblePlacementStrategy([[0], [0]], node_group_label="agents")
    with Light.create_group().launch(configured, strategy, name="light") as group:
        assert group.variables().wait() == [("0", "$1"), ("1", "$1")]


def test_one_that_a_worker_launches_is_forked_too(cluster: Cluster) -> None:
    with Light.create_group().launch(cluster, NodePlacementStrategy([0]), name="light") as group:
        (parent,) = group.parent_of_a_child().wait()
        assert b"fork_server" in Path(f"/proc/{parent}/cmdline").read_bytes() or parent in group.parent().wait()


@pytest.mark.nightly
def test_many_start_in_waves_and_it_is_told_how_many_have(cluster: Cluster) -> None:
    told: list[tuple[int, int]] = []
    cluster.record(None, on_launch=lambda _, workers, started: told.append((workers, started)))
    many = WAVE * 2 + 1
    try:
        with Light.create_group().launch(cluster, NodePlacementStrategy([0] * many), name="light") as group:
            assert group.world_size == many
            assert len(set(group.parent().wait())) == 1
    finally:
        cluster.record(None)
    assert told == [(many, 0), (many, WAVE), (many, 2 * WAVE)]
