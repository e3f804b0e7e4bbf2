"""Workers that died are started again in their places, while the others go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.worker.group.worker_group import WorkerGroup
from rlinf_core.worker.worker import Worker

TWO = NodePlacementStrategy([0, 0])


class Peer(Worker):
    """Exchanges numbers with the workers of another group."""

    def __init__(self, base: int) -> None:
        super().__init__()
        self.base = base

    def who(self) -> tuple[int, int, str]:
        return self.base + self._rank, os.getpid(), os.environ["RANK"]

    def send_all(self, group: str, numbers: list[int], dies_at: int | None = None) -> None:
        for number in numbers:
            if dies_at == self._rank and number == numbers[-1]:
                os.kill(os.getpid(), signal.SIGKILL)
            self.send_to(dict.fromkeys((0, 1), (self._rank, number)), group)

    def leave_receives(self, group: str) -> None:
        for rank in (0, 1):
            self.recv(group, rank, async_op=True)

    def receive_all(self, group: str, count: int) -> list[dict[int, tuple[int, int]]]:
        return [self.recv_from(group, (0, 1)) for _ in range(count)]


@pytest.fixture(scope="module")
def groups(cluster: Cluster) -> Iterator[tuple[WorkerGroup[Peer], WorkerGroup[Peer]]]:
    sending, receiving = Peer.create_group(10), Peer.create_group(20)
    with sending.launch(cluster, TWO, "relaunched"), receiving.launch(cluster, TWO, "going_on"):
        yield sending, receiving


def kill(group: WorkerGroup[Peer], rank: int) -> None:
    pid = group.who().wait()[rank][1]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerGroupError):
        group.execute_on(rank).who().wait()


def test_a_dead_rank_is_started_again_alone(groups: tuple[WorkerGroup[Peer], WorkerGroup[Peer]]) -> None:
    group, _ = groups
    before = group.who().wait()
    kill(group, 1)
    group.relaunch(1)
    after = group.who().wait()
    assert [number for number, _, _ in after] == [10, 11]
    assert [rank for _, _, rank in after] == ["0", "1"]
    assert after[0] == before[0]
    assert after[1][1] != before[1][1]


def test_a_rank_is_relaunched_more_than_once(groups: tuple[WorkerGroup[Peer], WorkerGroup[Peer]]) -> None:
    group, _ = groups
    for _ in range(2):
        kill(group, 0)
        group.relaunch(0)
    elsewhere = WorkerGroup.from_group_name(Peer, "relaunched")
    assert elsewhere.who().wait() == group.who().wait()
    # The second death is told of the second life.
    kill(group, 0)
    with pytest.raises(WorkerGroupError) as caught:
        elsewhere.execute_on(0).who().wait()
    assert isinstance(caught.value.exceptions[0], WorkerDiedError)
    group.relaunch(0)


def test_a_living_rank_is_ended_first(groups: tuple[WorkerGroup[Peer], WorkerGroup[Peer]]) -> None:
    _, group = groups
    before = group.who().wait()
    group.relaunch(0)
    after = group.who().wait()
    assert after[0][1] != before[0][1]
    assert after[1] == before[1]


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_an_exchange_begins_anew_without_what_was_sent(
    groups: tuple[WorkerGroup[Peer], WorkerGroup[Peer]], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of the failed attempt, and receives that it left behind, take nothing of the next one, though one group
    begins to drop them `seconds` after the other.
    """
    sending, receiving = groups
    ask = WorkerGroup[Peer]._asked

    def late(group: WorkerGroup[Peer], question: str, *args: object) -> Any:
        time.sleep(seconds if group is receiving else 0.0)
        return ask(group, question, *args)

    monkeypatch.setattr(WorkerGroup, "_asked", late)
    sent = sending.send_all("going_on", [1, 2, 3], 1)
    received = receiving.receive_all("relaunched", 3)
    with pytest.raises(WorkerGroupError, match="died"):
        received.wait()
    for handle in (sent, received):
        handle.abandon()
    sending.relaunch(1)
    receiving.leave_receives("relaunched").wait()
    sending.drop_messages(receiving)
    again = receiving.receive_all("relaunched", 2)
    sending.send_all("going_on", [7, 8]).wait()
    assert again.wait() == [[{0: (0, number), 1: (1, number)} for number in (7, 8)]] * 2
