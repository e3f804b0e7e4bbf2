"""Methods of workers: what they return, how they end, names that users choose, and names that nobody has."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import PayloadError, PlacementError, UnknownGroupError, WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.worker.worker import Worker
from rlinf_core.worker.worker_group import WorkerGroup

# Seconds after which a call hangs, however busy the machine is.
HANGS = 60


class Leaver(Worker):
    def leave(self) -> None:
        sys.exit(3)

    async def leave_async(self) -> None:
        sys.exit(3)

    async def interrupt(self) -> None:
        raise KeyboardInterrupt

    async def stay(self) -> int:
        return self._rank


@pytest.fixture(scope="module")
def leavers(cluster: Cluster) -> Iterator[WorkerGroup[Leaver]]:
    """Three workers, of which tests end two."""
    with Leaver.create_group().launch(cluster, NodePlacementStrategy([0] * 3), name="leavers") as group:
        yield group


@pytest.mark.parametrize(("rank", "method"), [(0, "leave"), (1, "leave_async")])
def test_a_method_that_exits_ends_its_worker(leavers: WorkerGroup[Leaver], rank: int, method: str) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        getattr(leavers.execute_on(rank), method)().wait(timeout=HANGS)
    (error,) = caught.value.exceptions
    assert isinstance(error, WorkerDiedError)
    assert error.cause is not None
    assert re.search(r"exit code 3|sys\.exit\(3\)", error.cause)


def test_a_method_that_is_interrupted_fails_and_its_worker_stays(leavers: WorkerGroup[Leaver]) -> None:
    worker = leavers.execute_on(2)
    with pytest.raises(WorkerGroupError, match="KeyboardInterrupt"):
        worker.interrupt().wait(timeout=HANGS)
    assert worker.stay().wait(timeout=HANGS) == [2]


def _break() -> None:
    raise OSError("it is broken")


class Fragile:
    """Cannot be rebuilt from its pickle."""

    def __reduce__(self) -> Any:
        return _break, ()


class Giver(Worker):
    def rank(self) -> int:
        return self._rank

    def add(self, number: int) -> int:
        return self._rank + number

    def returned(self, value: Any) -> Any:
        return value

    def fragile(self) -> Any:
        return Fragile()

    def items(self) -> Iterator[int]:
        yield from range(3)

    async def items_async(self) -> AsyncIterator[int]:
        for item in self.items():
            yield item

    async def items_later(self) -> Iterator[int]:
        return self.items()


@pytest.fixture(scope="module")
def givers(cluster: Cluster) -> Iterator[WorkerGroup[Giver]]:
    with Giver.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="givers") as group:
        yield group


def test_a_call_on_no_ranks_has_no_results(givers: WorkerGroup[Giver]) -> None:
    async def call() -> list[int]:
        return await asyncio.wait_for(givers.execute_on().rank().async_wait(), HANGS)

    assert asyncio.run(call()) == []
    handle = givers.execute_on().rank()
    assert handle.done()
    assert handle.wait() == []
    assert handle.consume_durations() == {}
    handle.cancel()


@pytest.mark.parametrize("method", ["items", "items_async", "items_later"])
def test_a_generator_is_refused_by_its_name(givers: WorkerGroup[Giver], method: str) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        getattr(givers, method)().wait(timeout=HANGS)
    for error in caught.value.exceptions:
        assert isinstance(error, TypeError)
        assert f"`Giver.{method}` returned a generator, which cannot be sent: return a list" in str(error)


def test_containers_arrive_with_what_they_share(givers: WorkerGroup[Giver]) -> None:
    row, data = [1], bytearray(b"ab")
    for shared in ([row, row, data], {"a": row, "b": row, "c": data}):
        for call in (givers.returned(shared), givers.returned.scatter([shared] * 2), givers.returned(value=shared)):
            for result in call.wait(timeout=HANGS):
                one, other, text = result if isinstance(result, list) else result.values()
                assert one is other
                assert (one, text, type(text)) == (row, data, bytearray)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda group: group.add(Fragile()), r"givers:\d: an argument of `add` cannot be rebuilt"),
        (lambda group: group.fragile(), r"^the result of `fragile` cannot be rebuilt"),
    ],
)
def test_what_cannot_be_rebuilt_is_named(givers: WorkerGroup[Giver], call: Any, said: str) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        call(givers).wait(timeout=HANGS)
    for error in caught.value.exceptions:
        assert isinstance(error, PayloadError)
        assert re.match(f"{said}\n  why: OSError: it is broken$", str(error))


class Stubborn:
    def __reduce__(self) -> Any:
        raise OSError("cannot pickle it")


@pytest.mark.parametrize("lock", [threading.Lock(), Stubborn()], ids=["lock", "stubborn"])
def test_what_does_not_pickle_is_not_sent(cluster: Cluster, givers: WorkerGroup[Giver], lock: Any) -> None:
    for call in (
        lambda: givers.add(lock),
        lambda: givers.add(number=[lock]),
        lambda: givers.add.scatter([1, lock]),
        lambda: Giver.create_group(lock).launch(cluster),
    ):
        with pytest.raises(PayloadError, match=r"it cannot be pickled: (TypeError|OSError): cannot pickle") as caught:
            call()
        assert len(str(caught.value).splitlines()) == 3
    assert givers.add.scatter([1, 2]).wait(timeout=HANGS) == [1, 3]


def test_a_call_cancelled_as_soon_as_made_costs_the_next_nothing(givers: WorkerGroup[Giver]) -> None:
    """Ray drops one that was not sent yet, and the worker then waits for it before it begins the next."""
    for _ in range(50):
        givers.add(1).cancel()
    assert givers.add.scatter([1, 2]).wait(timeout=HANGS) == [1, 3]


@pytest.mark.parametrize("rank", ["0", None, [0, 1], 0.0, True, -1, 10**400])
def test_what_is_no_rank_is_refused(givers: WorkerGroup[Giver], rank: Any) -> None:
    with pytest.raises(ValueError, match=r"`givers` has no rank .*, only 0-1"):
        givers.execute_on(rank)
    with pytest.raises(ValueError, match=r"`givers` has no rank .*, only 0-1"):
        givers.relaunch(0, rank)
    assert givers.add(1).wait(timeout=HANGS) == [1, 2]


def test_a_rank_may_be_a_number_of_numpy(givers: WorkerGroup[Giver]) -> None:
    ranks: list[Any] = [np.int64(1), np.argmin([3, 5])]
    assert givers.execute_on(*ranks).rank().wait() == [1, 0]


@pytest.mark.parametrize("share", [5, {1, 2}, {0: 1, 1: 2}, (number for number in range(2)), np.array(2), None])
def test_what_has_no_item_for_each_rank_is_refused(givers: WorkerGroup[Giver], share: Any) -> None:
    with pytest.raises(ValueError, match="is not a sequence for 2 workers: pass one item for each"):
        givers.add.scatter(share)
    with pytest.raises(ValueError, match="is not a sequence for 2 workers: pass one item for each"):
        givers.add.scatter(number=share)


@pytest.mark.parametrize("share", [[1, 2], (1, 2), range(1, 3), np.array([1, 2])])
def test_what_has_items_by_position_is_scattered(givers: WorkerGroup[Giver], share: Any) -> None:
    assert givers.add.scatter(share).wait() == [1, 3]


@pytest.mark.parametrize("strategy", [2, [0, 0], NodePlacementStrategy])
def test_what_is_no_placement_is_refused(cluster: Cluster, strategy: Any) -> None:
    with pytest.raises(PlacementError, match="is not a placement of processes"):
        Giver.create_group().launch(cluster, strategy)


class Late(Worker):
    async def __init__(self) -> None:  # pyright: ignore[reportGeneralTypeIssues] - the mistake under test
        self.ready = True


@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_constructor_is_not_asynchronous(cluster: Cluster) -> None:
    with pytest.raises(WorkerGroupError, match=r"`Late.__init__` must return None, not 'coroutine'"):
        Late.create_group().launch(cluster, NodePlacementStrategy([0]), name="late")


@pytest.mark.parametrize("several", [0, -1, 1.5, "2", True])
def test_what_is_no_number_of_methods_is_refused(cluster: Cluster, several: Any) -> None:
    with pytest.raises(ValueError, match=r"`max_concurrency` is .*, expected an integer >= 1"):
        Giver.create_group().launch(cluster, NodePlacementStrategy([0]), name="several", max_concurrency=several)


class Careless(Worker):
    """Uses whatever names come to mind."""

    def __init__(self) -> None:
        for name in ("bound", "client", "context", "group", "groups", "logger", "members", "method", "name", "timer"):
            setattr(self, f"_{name}", object())
        self.timer = object()

    def _pair(self) -> None:
        raise NotImplementedError

    def _bind(self) -> None:
        raise NotImplementedError

    def _group_size(self) -> None:
        raise NotImplementedError

    def swap(self, value: int) -> int:
        self.log_info("rank %d swaps", self._rank)
        with self.worker_timer("swap"):
            self.send(value, "careless", 1 - self._rank)
            return self.recv("careless", 1 - self._rank)

    def share(self, value: int) -> int:
        return self.broadcast(value, ["careless"], ("careless", 0))


def test_names_of_subclasses_are_their_own(cluster: Cluster) -> None:
    with Careless.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="careless") as group:
        assert group.swap.scatter([5, 7]).wait(timeout=HANGS) == [7, 5]
        assert group.share.scatter([3, 4]).wait(timeout=HANGS) == [3, 3]


def test_what_the_runtime_keeps_in_workers_is_named_for_it() -> None:
    ours = {name for name in dir(Worker) if name.startswith("_") and not name.startswith(("__", "_rlinf"))}
    # Those that users read, and what they override to give back what they hold.
    assert ours == {"_rank", "_world_size", "_group_name", "_close"}


class Teller(Worker):
    def tell(self) -> dict[str, Any]:
        self.log_on_first_rank("one line for the group")
        return {
            "rank": (self.rank, self._rank),
            "world_size": (self.world_size, self._world_size),
            "group": self._group_name,
            "has_accelerator": self.has_accelerator,
            "hardware": self.hardware_infos,
            "port": self.acquire_free_port(),
        }

    def keep(self, rank: int) -> int:
        self.rank = rank
        return self.rank

    def train(self) -> None:
        with self.worker_timer():
            pass
        with self.worker_timer("part"):
            pass

    def channel(self, name: str) -> str:
        created = self.create_channel(name=name, node_id=0)
        created.put("there", key=("actor", 0))
        try:
            created.get_nowait()
        except asyncio.QueueEmpty:
            return self.connect_channel(name=name).get(key=("actor", 0))
        raise AssertionError("something was got")

    async def await_work(self) -> Any:
        peer = 1 - self.rank
        sent = self.send(self.rank, self._group_name, peer, async_op=True)
        received = await self.recv(self._group_name, peer, async_op=True)
        await sent
        return received


def test_what_a_worker_and_its_group_know(cluster: Cluster) -> None:
    with Teller.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="tellers") as group:
        for rank, output in enumerate(group.tell().wait()):
            assert output.pop("port") > 0
            assert output == {
                "rank": (rank, rank),
                "world_size": (2, 2),
                "group": "tellers",
                "has_accelerator": False,
                "hardware": (),
            }
        assert [(str(item.address), item.rank, item.node_id) for item in group.worker_info_list] == [
            ("tellers:0", 0, 0),
            ("tellers:1", 1, 0),
        ]
        handle = group.train()
        assert handle.consume_duration() == handle.consume_durations()["train"]
        assert handle.consume_duration("part", "sum") >= handle.consume_duration("part")
        with pytest.raises(KeyError, match=r"no timer `other` ran in tellers\.train"):
            handle.consume_duration("other")
        assert group.execute_on(0).channel("told").wait() == ["there"]
        assert group.await_work().wait() == [1, 0]
        assert group.keep(7).wait() == [7, 7], "a subclass may keep a value of its own under the name"
    assert cluster.get_node_group() == cluster.get_node_group("cluster")


class Misspeller(Worker):
    def recv_from(self, group: str) -> Any:
        return self.recv(group, 0)

    def send_to(self, group: str) -> None:
        self.send("hello", group, 0)

    def send_in_background(self, group: str) -> None:
        self.send([0] * 100_000, group, 0, async_op=True).wait()

    def connect_to(self, channel: str) -> Any:
        return self.connect_channel(channel)


@pytest.fixture(scope="module")
def misspeller(cluster: Cluster) -> Iterator[WorkerGroup[Misspeller]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLINF_CONNECT_TIMEOUT", "600")
        with Misspeller.create_group().launch(cluster, "0:0", name="misspeller") as group:
            yield group


def refused(group: WorkerGroup[Misspeller], method: str, name: str) -> UnknownGroupError:
    with pytest.raises(WorkerGroupError) as caught:
        getattr(group, method)(name).wait()
    (error,) = caught.value.exceptions
    assert isinstance(error, UnknownGroupError)
    return error


# How it is looked for makes no difference.
@pytest.mark.parametrize(
    "method",
    ["recv_from", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("send_to", "send_in_background"))],
)
def test_a_misspelt_group_is_refused_when_everybody_waits(misspeller: WorkerGroup[Misspeller], method: str) -> None:
    error = refused(misspeller, method, "mispeller")
    assert "did you mean `misspeller`" in (error.help or "")


def test_a_misspelt_channel_is_refused_with_those_that_exist(misspeller: WorkerGroup[Misspeller]) -> None:
    Channel.create("rollout_output")
    error = refused(misspeller, "connect_to", "rollout_outputs")
    assert error.message == "no channel is named `rollout_outputs`"
    assert "rollout_output" in error.known
    assert "misspeller" not in error.known
    assert "did you mean `rollout_output`" in (error.help or "")
