"""Workers that send to each other on a real local Ray; what they log and print, and what they did in the trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.context import enter_session
from rlinf_core.errors import CommunicationTimeoutError, InvalidNameError, MismatchError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.process.known_secrets import remember
from rlinf_core.runners.trace import TraceWriter
from rlinf_core.worker.worker import Worker
from rlinf_core.worker.worker_group import WorkerGroup


class Talker(Worker):
    def exchange(self, group: str) -> dict[int, Any]:
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        self.send_to({rank: (self._rank, rank) for rank in others}, group)
        return self.recv_from(group, reversed(others))

    def with_payload(self, group: str) -> list[Any]:
        if self._rank == 0:
            self.send([1, 2], group, 1, piggyback_payload={"version": 7})
            self.send([3], group, 1, async_op=True, piggyback_payload=0).wait()
            self.send([4], group, 1, piggyback_payload=None)
            return []
        return [self.recv(group, 0) for _ in range(3)]

    def mismatch(self, group: str) -> None:
        import torch

        if self._rank == 0:
            self.send_tensor(torch.ones(4), group, 1)
            # It comes after the peer's answer, so that this call knows of the mismatch when it ends.
            self.recv(group, 1)
        else:
            try:
                self.recv_tensor(torch.ones(3), group, 0)
            finally:
                self.send("done", group, 0)

    def late_mismatch(self, group: str) -> str | None:
        """Send what does not fit; the peer finds out when this call may be over."""
        import torch

        if self._rank == 0:
            self.send_tensor(torch.ones(4), group, 1)
            return None
        try:
            self.recv_tensor(torch.ones(3), group, 0)
        except MismatchError as error:
            return type(error).__name__
        return "nothing"

    def objects(self, group: str) -> str | None:
        if self._rank == 0:
            self.send("sound", group, 1)
            return None
        return self.recv(group, 0)

    def first_weights(self, group: str) -> Any:
        return self.broadcast(self._rank, [(group, 2), (group, [0, 1])])

    def repeated(self, group: str) -> Any:
        if self._rank == 0:
            return [self.send(word, group, 1) for word in ("one", "two")]
        return [self.recv_from(group, [0, 0]), self.recv(group, 0)]

    def too_early(self, group: str) -> Any:
        """Receive from two workers before they send, and again once they do."""
        if self._rank < 2:
            self.recv(group, 2)
            return self.send(self._rank, group, 2)
        with suppress(CommunicationTimeoutError):
            self.recv_from(group, [0, 1], timeout=0.1)
        self.send_to({0: "now", 1: "now"}, group)
        return self.recv_from(group, [0, 1])

    def broadcast_to(self, groups: Any, src: Any) -> Any:
        return self.broadcast(1, groups, src)

    def modules(self) -> list[str]:
        return [name for name in ("torch", "numpy", "rich", "pydantic") if name in sys.modules]


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> WorkerGroup[Talker]:
    with Talker.create_group().launch(cluster, NodePlacementStrategy([0] * 3), name="talk") as launched:
        yield launched


def test_a_worker_that_does_not_use_torch_does_not_import_it(group: WorkerGroup[Talker]) -> None:
    assert "torch" not in group.modules().wait()[0]


def test_each_rank_its_own(group: WorkerGroup[Talker]) -> None:
    received = group.exchange("talk").wait(timeout=20)
    assert [list(item.items()) for item in received] == [
        [(2, (2, 0)), (1, (1, 0))],
        [(2, (2, 1)), (0, (0, 1))],
        [(1, (1, 2)), (0, (0, 2))],
    ]


def test_a_rank_that_is_named_twice_is_received_from_once(group: WorkerGroup[Talker]) -> None:
    assert group.execute_on(0, 1).repeated("talk").wait(timeout=20)[1] == [{0: "one"}, "two"]


def test_receives_that_were_given_up_take_no_message(group: WorkerGroup[Talker]) -> None:
    assert group.too_early("talk").wait(timeout=20)[2] == {0: 0, 1: 1}


def test_a_payload_travels_with_an_object(group: WorkerGroup[Talker]) -> None:
    received = group.execute_on(0, 1).with_payload("talk").wait(timeout=20)
    assert received == [[], [([1, 2], {"version": 7}), ([3], 0), [4]]]


def test_first_of_the_first_group_sends_where_no_source_is_named(group: WorkerGroup[Talker]) -> None:
    assert group.first_weights("talk").wait(timeout=20) == [2, 2, 2]


@pytest.mark.parametrize(
    ("groups", "src"), [("talk", ("talk", 0)), (["talk"], "talk:0"), ([("talk", 1.5)], ("talk", 0))]
)
def test_broadcast_without_members_is_refused_everywhere(group: WorkerGroup[Talker], groups: Any, src: Any) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        group.broadcast_to(groups, src).wait(timeout=20)
    assert caught.value.ranks == (0, 1, 2)
    assert all(isinstance(error, InvalidNameError) for error in caught.value.exceptions)


def test_a_mismatch_is_an_error_on_both_sides(group: WorkerGroup[Talker]) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        group.execute_on(0, 1).mismatch("talk").wait(timeout=60)
    assert caught.value.ranks == (0, 1)
    assert all(isinstance(error, MismatchError) for error in caught.value.exceptions)


def test_a_mismatch_does_not_spoil_the_calls_after_it(group: WorkerGroup[Talker]) -> None:
    # The sender's call may be over when its mismatch is reported.
    with suppress(WorkerGroupError):
        assert group.execute_on(0, 1).late_mismatch("talk").wait(timeout=60)[1] == "MismatchError"
    assert group.execute_on(0, 1).objects("talk").wait(timeout=60)[1] == "sound"


class Logger(Worker):
    def talk(self, word: str) -> tuple[int, str]:
        self.log_info("logged %s", word)
        print(f"printed {word}")
        sys.stderr.writelines([f"complained {word}\n"])
        return sys.stdout.fileno(), sys.stdout.encoding


@pytest.fixture
def recorded(cluster: Cluster) -> Iterator[Cluster]:
    before = cluster.session
    yield cluster
    cluster.record(None)
    cluster.session = before
    enter_session(before)


def test_each_worker_has_a_file(recorded: Cluster, tmp_path: Path) -> None:
    recorded.record(tmp_path / "logs", log_names={"TalkGroup": "talk"})
    strategy = NodePlacementStrategy([0] * 2)
    for word in ("first", "second"):
        # A worker that is launched again writes behind the one before it.
        with Logger.create_group().launch(recorded, strategy, name="TalkGroup") as group:
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
    with Logger.create_group().launch(recorded, NodePlacementStrategy([0]), name="TalkGroup") as group:
        group.talk("value-of-an-api-key").wait()
    text = (tmp_path / "logs" / "talk" / "rank_0.log").read_text()
    for begin in ("logged", "printed", "complained"):
        assert f"{begin} ********\n" in text
    assert "value-of-an-api-key" not in text


def test_a_folder_that_cannot_be_written_is_no_failure(recorded: Cluster, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    recorded.record(tmp_path / "logs")
    with Logger.create_group().launch(recorded, NodePlacementStrategy([0]), name="quiet") as group:
        assert group.talk("anyway").wait()


class Ping(Worker):
    def play(self, rounds: int) -> None:
        with self.worker_timer("rally"):
            for _ in range(rounds):
                if self._rank == 0:
                    self.send(np.zeros(1000), "traced-group", 1)
                else:
                    self.recv("traced-group", 0)


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
