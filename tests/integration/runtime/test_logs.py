"""What workers log and print is in a file for each of them; what they did is in the trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.context import enter_session
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.process.known_secrets import remember
from rlinf_core.runners.trace import TraceWriter
from rlinf_core.worker.worker import Worker


class Talker(Worker):
    def talk(self, word: str) -> tuple[int, str]:
        self.log_info("logged %s", word)
        print(f"printed {word}")
        sys.stderr.writelines([f"complained {word}\n"])
        return sys.stdout.fileno(), sys.stdout.encoding


@pytest.fixture
def recorded(cluster: Cluster) -> Iterator[Cluster]:
    before = cluster.session
    yield cluster
    cluster.session = before
    enter_session(before)


def test_each_worker_has_a_file(recorded: Cluster, tmp_path: Path) -> None:
    recorded.record(tmp_path / "logs", log_names={"TalkGroup": "talk"})
    strategy = NodePlacementStrategy([0] * 2)
    for word in ("first", "second"):
        # A worker that is launched again writes behind the one before it.
        with Talker.create_group().launch(recorded, strategy, name="TalkGroup") as group:
            answers = group.talk(word).wait()
        assert [descriptor for descriptor, _ in answers] == [1, 1]
        assert {encoding.lower() for _, encoding in answers} == {"utf-8"}
    for rank in range(2):
        lines = (tmp_path / "logs" / "talk" / f"rank_{rank}.log").read_text().splitlines()
        logged = [line for line in lines if f"INFO [TalkGroup:{rank}] logged" in line]
        assert logged == [lines[1], lines[5]]
        births = [line for line in lines if f"is rank {rank} of 2 on node 0" in line]
        assert births == [lines[0], lines[4]]
        assert [line for line in lines if line not in logged + births] == [
            "printed first",
            "complained first",
            "printed second",
            "complained second",
        ]


@pytest.mark.security
def test_secret_values_are_masked_in_a_workers_log(
    recorded: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    remember(["value-of-an-api-key"])
    recorded.record(tmp_path / "logs", log_names={"TalkGroup": "talk"})
    with Talker.create_group().launch(recorded, NodePlacementStrategy([0]), name="TalkGroup") as group:
        group.talk("value-of-an-api-key").wait()
    text = (tmp_path / "logs" / "talk" / "rank_0.log").read_text()
    for begin in ("logged", "printed", "complained"):
        assert f"{begin} ********\n" in text
    assert "value-of-an-api-key" not in text


def test_a_folder_that_cannot_be_written_is_no_failure(recorded: Cluster, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    recorded.record(tmp_path / "logs")
    with Talker.create_group().launch(recorded, NodePlacementStrategy([0]), name="quiet") as group:
        assert group.talk("anyway").wait()


class Ping(Worker):
    def play(self, rounds: int) -> None:
        with self.worker_timer("rally"):
            for _ in range(rounds):
                if self._rank == 0:
                    self.send(np.zeros(1000), "traced-group", 1)
                else:
                    self.recv("traced-group", 0)


@pytest.fixture
def traced(cluster: Cluster) -> Iterator[Cluster]:
    before = cluster.session
    yield cluster
    cluster.record(None)
    cluster.session = before
    enter_session(before)


def test_what_workers_did_is_in_the_trace(traced: Cluster, tmp_path: Path) -> None:
    traced.record(None, trace=True)
    path = tmp_path / "trace.json"
    with (
        TraceWriter(path) as writer,
        Ping.create_group().launch(traced, NodePlacementStrategy([0] * 2), name="traced-group") as group,
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
