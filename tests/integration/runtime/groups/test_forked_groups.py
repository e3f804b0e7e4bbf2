"""Groups whose processes are forked from one that has imported their module; ranks that are launched again."""

from __future__ import annotations

import os
import random
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.config.sections.cluster import ClusterConfig
from rlinf_core.errors import WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.placement.strategies import FlexiblePlacementStrategy, NodePlacementStrategy
from rlinf_core.worker.launch import WAVE
from rlinf_core.worker.worker import Worker
from rlinf_core.worker.worker_group import WorkerGroup
from tests.integration.runtime.groups.imported_once import Imported
from tests.waiting import until


@dataclass
class Exact:
    number: int


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

    def leave(self) -> None:
        sys.exit(5)

    def parent_of_a_child(self) -> bytes:
        with Light.create_group().launch(Cluster(), NodePlacementStrategy([0]), name="light-child") as child:
            (parent,) = child.parent().wait()
            return Path(f"/proc/{parent}/cmdline").read_bytes()

    def parent_of(self, group: str, rank: int) -> int:
        (parent,) = WorkerGroup.from_group_name(Light, group).execute_on(rank).parent().wait()
        return parent

    def note(self, number: int) -> list[int]:
        self._notes = [*getattr(self, "_notes", ()), number]
        return self._notes

    def lock(self) -> object:
        return threading.Lock()

    def wait_for(self, channel: str) -> int:
        return self.connect_channel(channel).get()

    def meet(self) -> int:
        """Return when another call has come, too."""
        self._barrier = self.__dict__.setdefault("_barrier", threading.Barrier(2))
        return self._barrier.wait(60) // 2

    def value(self, *args: object, **kwargs: object) -> tuple[object, object]:
        return args[0], kwargs["key"]

    def broken(self) -> None:
        raise threading.BrokenBarrierError("on purpose")

    def greet(self) -> None:
        # Unlike words: Ray merges lines that differ by numbers, where it was imported early.
        print(f"a greeting of the {('first', 'second')[self._rank]}", flush=True)


@pytest.fixture
def pair(cluster: Cluster) -> Iterator[WorkerGroup[Light]]:
    """Two that a test may end."""
    with Light.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="light") as group:
        yield group


@pytest.fixture(scope="module")
def unharmed(cluster: Cluster) -> Iterator[WorkerGroup[Light]]:
    """Two that tests share, and leave as they are."""
    with Light.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="unharmed") as group:
        yield group


def pids_of(group: WorkerGroup[Light]) -> list[int]:
    return [info.pid for info in group.worker_info_list]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


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


def test_bases_of_a_script_class_are_imported_once(cluster: Cluster) -> None:
    script_class = type("OfTheScript", (Imported,), {"__module__": "__main__"})
    with script_class.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="script") as group:
        parents = {parent_of(pid) for pid in pids_of(group)}
        assert set(group.importer().wait()) == parents
        assert len(parents) == 1


def test_the_death_of_one_is_told_and_another_group_can_follow(cluster: Cluster) -> None:
    with Light.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="light") as group:
        with pytest.raises(WorkerGroupError, match=r"`light:1` on node 0.*\n.*it was killed"):
            group.execute_on(1).end().wait(timeout=60)
        assert len(group.execute_on(0).parent().wait()) == 1
    with Light.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="light") as group:
        assert len(set(group.parent().wait())) == 1


def test_the_environment_of_a_node_group_reaches_them(cluster: Cluster) -> None:
    inputs = {"label": "agents", "node_ranks": "0", "env_configs": [{"node_ranks": "0", "env_vars": [{"MARK": "$1"}]}]}
    configured = Cluster(cluster_cfg=ClusterConfig.model_validate({"num_nodes": 1, "node_groups": [inputs]}))
    strategy = FlexiblePlacementStrategy([[0], [0]], node_group_label="agents")
    with Light.create_group().launch(configured, strategy, name="light") as group:
        assert group.variables().wait() == [("0", "$1"), ("1", "$1")]


@pytest.mark.nightly
def test_one_that_a_worker_launches_is_forked_too(cluster: Cluster) -> None:
    with Light.create_group().launch(cluster, NodePlacementStrategy([0]), name="light") as group:
        assert b"fork_server" in group.parent_of_a_child().wait()[0]


def test_calls_keep_their_order_and_results_their_types(unharmed: WorkerGroup[Light]) -> None:
    calls = [unharmed.note(number) for number in range(200)]
    assert calls[-1].wait() == [list(range(200))] * 2
    (result, _) = unharmed.value(np.arange(3, dtype=np.int16), key={"a": Exact(2)}).wait()
    assert result[0].dtype == np.int16
    assert result[1] == {"a": Exact(2)}


def test_another_process_calls_them_by_name(cluster: Cluster, unharmed: WorkerGroup[Light]) -> None:
    with Light.create_group().launch(cluster, NodePlacementStrategy([0]), name="light-caller") as caller:
        assert caller.parent_of("unharmed", 1).wait() == [unharmed.parent().wait()[1]]


def test_failures_are_those_of_other_workers(pair: WorkerGroup[Light]) -> None:
    with pytest.raises(WorkerGroupError, match=r"the result of `lock` cannot be sent"):
        pair.lock().wait()
    with pytest.raises(WorkerGroupError, match=r"BrokenBarrierError|barrier"):
        pair.broken().wait()
    assert len(pair.parent().wait()) == 2
    with pytest.raises(WorkerGroupError, match=r"`light:1` on node 0.*\n.*sys.exit\(5\)"):
        pair.execute_on(1).leave().wait(timeout=60)
    with pytest.raises(WorkerGroupError, match="light:1"):
        pair.parent().wait(timeout=60)


def test_a_cancelled_call_ends_its_wait(unharmed: WorkerGroup[Light]) -> None:
    channel = Channel.create("light-empty")
    call = unharmed.wait_for(channel.name)
    call.cancel()
    with pytest.raises(WorkerGroupError, match="was cancelled"):
        call.wait()
    assert len(unharmed.parent().wait(timeout=60)) == 2
    channel.close()


def test_several_calls_at_once_run_on_threads(cluster: Cluster) -> None:
    with Light.create_group().launch(cluster, NodePlacementStrategy([0]), name="light", max_concurrency=2) as group:
        first, second = group.meet(), group.meet()
        assert first.wait(60) == second.wait(60) == [0]


def test_a_rank_is_launched_again_beside_the_others(pair: WorkerGroup[Light]) -> None:
    server, _ = pair.parent().wait()
    for rank in (0, 1, 0):
        with pytest.raises(WorkerGroupError, match=f"light:{rank}"):
            pair.execute_on(rank).end().wait(timeout=60)
        pair.relaunch(rank)
        pair.parent().wait(timeout=60)
    assert server not in pair.parent().wait()


def test_processes_end_with_their_host(pair: WorkerGroup[Light]) -> None:
    watched = [os.pidfd_open(pid) for pid in pids_of(pair)]
    (parent, _) = pair.parent().wait()
    os.kill(parent_of(parent), signal.SIGKILL)
    with pytest.raises(WorkerGroupError, match=r"light:[01]"):
        pair.parent().wait(timeout=60)
    for descriptor in watched:
        assert select.select([descriptor], [], [], 60)[0]
        os.close(descriptor)


def test_their_lines_have_their_names(unharmed: WorkerGroup[Light], capfd: pytest.CaptureFixture[str]) -> None:
    unharmed.greet().wait()
    greetings: list[tuple[str, ...]] = []

    def both_came() -> bool:
        greetings.extend(re.findall(r"\((unharmed:\d) pid=(\d+)\) a greeting of the (\w+)", capfd.readouterr().out))
        return len(greetings) >= 2

    until(both_came, "a line of each process")
    first, second = map(str, pids_of(unharmed))
    assert sorted(greetings) == [("unharmed:0", first, "first"), ("unharmed:1", second, "second")]


def test_a_process_that_cannot_be_forked_fails_the_launch(cluster: Cluster) -> None:
    # Not at the head of this module, which other servers import.
    from tests.integration.runtime.groups.forkless import Forkless

    with pytest.raises(WorkerGroupError, match=r"its process is gone: .*no room for a process"):
        Forkless.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="forkless")


@pytest.mark.nightly
def test_many_start_in_waves_and_it_is_told_how_many_have(cluster: Cluster) -> None:
    output: list[tuple[int, int]] = []
    cluster.record(None, on_launch=lambda _, workers, started: output.append((workers, started)))
    many = WAVE * 2 + 1
    try:
        with Light.create_group().launch(cluster, NodePlacementStrategy([0] * many), name="light") as group:
            assert group.world_size == many
            assert len(set(group.parent().wait())) == 1
    finally:
        cluster.record(None)
    assert output == [(many, 0), (many, WAVE), (many, 2 * WAVE)]


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


def test_a_dead_rank_is_relaunched_alone_more_than_once(groups: tuple[WorkerGroup[Peer], WorkerGroup[Peer]]) -> None:
    group, _ = groups
    before = group.who().wait()
    for _ in range(2):
        kill(group, 0)
        group.relaunch(0)
    after = group.who().wait()
    assert [(number, rank) for number, _, rank in after] == [(10, "0"), (11, "1")]
    assert after[0][1] != before[0][1]
    assert after[1] == before[1]
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


@pytest.mark.parametrize("seconds", [0.0, pytest.param(1.0, marks=pytest.mark.nightly)])
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
