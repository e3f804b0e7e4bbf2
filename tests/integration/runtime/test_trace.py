"""The trace of real workers: their methods, timers, waits and messages, in one file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.context import enter_session
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.runners.trace import TraceWriter
from rlinf_core.worker.worker import Worker


class Ping(Worker):
    def play(self, rounds: int) -> None:
        with self.worker_timer("rally"):
            for _ in range(rounds):
                if self._rank == 0:
                    self.send(np.zeros(1000), "traced-group", 1)
                else:
                    self.recv("traced-group", 0)


@pytest.fixture
def recorded(cluster: Cluster) -> Iterator[Cluster]:
    before = cluster.session
    yield cluster
    cluster.record(None)
    cluster.session = before
    enter_session(before)


def test_what_workers_did_is_in_the_trace(recorded: Cluster, tmp_path: Path) -> None:
    recorded.record(None, trace=True)
    path = tmp_path / "trace.json"
    with (
        TraceWriter(path) as writer,
        Ping.create_group().launch(recorded, NodePlacementStrategy([0] * 2), name="traced-group") as group,
    ):
        group.play(3).wait()
        writer.collect([group])
        group.play(2).wait()
        writer.collect([group], last=True)
    events = json.loads(path.read_text())
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(processes) == {"driver", "traced-group:0", "traced-group:1"}

    def names(process: str, phase: str) -> list[str]:
        return [event["name"] for event in events if event["pid"] == processes[process] and event["ph"] == phase]

    for rank in range(2):
        assert names(f"traced-group:{rank}", "X").count("play") == 2
        assert names(f"traced-group:{rank}", "X").count("rally") == 2
    assert names("traced-group:0", "b").count("send to traced-group:1") == 5
    assert names("traced-group:1", "b").count("recv from traced-group:0") == 5
    assert names("driver", "X").count("call `traced-group.play()`") == 2


def test_untraced_workers_have_nothing_to_tell(cluster: Cluster) -> None:
    with Ping.create_group().launch(cluster, NodePlacementStrategy([0]), name="untraced-group") as group:
        assert group.take_spans().wait() == [([], 0)]
