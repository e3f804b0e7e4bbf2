"""Groups launched, called and ended, on a real local Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.channel.channel import Channel
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import (
    ChannelClosed,
    InvalidNameError,
    PlacementError,
    RemoteError,
    RuntimeFailure,
    UnknownGroupError,
)
from rlinf_core.failures import WorkerGroupError
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.worker.worker import Worker
from rlinf_core.worker.worker_group import WorkerGroup, launch_together
from tests.waiting import until


class OurError(Exception):
    def __init__(self, code: int, *, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code


class Listener(Worker):
    def say(self, group: str) -> None:
        """Send a word, and return once the next one is waited for."""
        self.send("a word", group, 0)
        self.recv(group, 0)

    def hear_two(self, group: str) -> None:
        self.recv(group, 0)
        second = self.recv(group, 0, async_op=True)
        self.send("go on", group, 0)
        second.wait()


class Unpicklable(Exception):  # noqa: N818
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Probe(Worker):
    def __init__(self, base: int = 0, fail_on: int | None = None) -> None:
        super().__init__()
        self.base = base
        if fail_on == self._rank:
            raise OurError(7, text="no camera")

    def rank(self) -> int:
        return self.base + self._rank

    def threads(self) -> tuple[str, int]:
        import torch

        return os.environ["OMP_NUM_THREADS"], torch.get_num_threads()

    def on_main_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    def use_asyncio(self) -> int:
        async def inner() -> int:
            await asyncio.sleep(0)
            return self._rank

        return asyncio.run(inner())

    async def coroutine(self, value: int) -> int:
        await asyncio.sleep(0)
        return value + self._rank

    def fail(self, rank: int, how: str = "ours") -> int:
        if self._rank == rank:
            if how == "ours":
                raise OurError(3, text="bad batch")
            if how == "lock":
                raise Unpicklable
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(3)
        return self._rank

    def wait_for_peer(self, group: str, rank: int) -> object:
        return self.recv(group, rank)

    def fail_while_others_work(self) -> None:
        if self._rank == 1:
            raise ValueError("rank 1 is broken")
        time.sleep(600)  # longer than a test may take

    def größe(self) -> int:
        return self._world_size

    def meet(self, folder: str) -> str:
        return _met(folder, "meet", "greet")

    def greet(self, folder: str) -> str:
        return _met(folder, "greet", "meet")

    def share(self, item: int, *, name: str) -> str:
        return f"{name}{item}"

    @Worker.timer("outer")
    def timed(self, seconds: float) -> int:
        with self.worker_timer("inner"):
            time.sleep(seconds * (self._rank + 1))
        return self._rank

    def all_reduce(self) -> float:
        import torch

        torch.distributed.init_process_group("gloo")
        tensor = torch.ones(1)
        torch.distributed.all_reduce(tensor)
        torch.distributed.destroy_process_group()
        return float(tensor)


def _met(folder: str, me: str, other: str) -> str:
    """Return once the other method of the same worker runs too."""
    Path(folder, me).touch()
    give_up = time.monotonic() + 30
    while not Path(folder, other).exists():
        assert time.monotonic() < give_up, f"{other} does not run"
        time.sleep(0.01)
    return me


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> WorkerGroup[Probe]:
    launched = Probe.create_group(10).launch(cluster, NodePlacementStrategy([0] * 4), name="probe")
    yield launched
    launched.shutdown()


@pytest.fixture(scope="module")
def stuck(cluster: Cluster) -> Iterator[WorkerGroup[Probe]]:
    """Three workers whose ranks 0 and 2 a test may leave at work."""
    with Probe.create_group().launch(cluster, NodePlacementStrategy([0] * 3), name="stuck") as launched:
        yield launched


def test_notebook_shows_cluster_group_and_view(cluster: Cluster, group: WorkerGroup[Probe]) -> None:
    assert repr(cluster) == f"<Cluster: {cluster.topology.counts}>"
    name, count = group.worker_group_name, group.world_size
    assert repr(group) == f"<WorkerGroup {name}: {count} Probe workers>"
    assert repr(group.execute_on(0, 1)) == f"<ranks 0-1 of {name}>"
    assert repr(group.coroutine) == f"<{name}.coroutine of {count} workers>"


def test_view_calls_its_ranks_in_order_and_no_others(group: WorkerGroup[Probe]) -> None:
    assert group.execute_on(3, 0).rank().wait() == [13, 10]
    assert len(group.rank().wait()) == 4


def test_threads_per_process_follow_the_environment(group: WorkerGroup[Probe]) -> None:
    said = os.environ.get("OMP_NUM_THREADS", "1")
    assert group.threads().wait() == [(said, int(said))] * 4


def test_torch_distributed_just_works(group: WorkerGroup[Probe]) -> None:
    assert group.all_reduce().wait(timeout=60) == [4.0] * 4


def test_methods_run_on_the_main_thread(group: WorkerGroup[Probe]) -> None:
    assert group.on_main_thread().wait() == [True] * 4


def test_asyncio_run_works_inside_a_method(group: WorkerGroup[Probe]) -> None:
    assert group.use_asyncio().wait() == [0, 1, 2, 3]


def test_a_handle_can_be_awaited(group: WorkerGroup[Probe]) -> None:
    async def call() -> list[int]:
        return await group.rank()

    assert asyncio.run(call()) == [10, 11, 12, 13]


def test_a_handle_gives_its_results_again(group: WorkerGroup[Probe]) -> None:
    handle = group.rank()
    assert handle.wait() == handle.wait()
    assert handle.done()


def test_results_live_no_longer_than_their_handle(group: WorkerGroup[Probe]) -> None:
    handle = group.rank()
    handle.wait()
    gone = weakref.ref(handle)
    del handle
    assert gone() is None


def test_a_method_may_have_any_name(group: WorkerGroup[Probe]) -> None:
    assert group.größe().wait() == [4] * 4


def test_methods_of_one_worker_overlap_where_that_is_asked_for(cluster: Cluster, tmp_path: Path) -> None:
    placement, two = NodePlacementStrategy([0]), cast("int", np.int64(2))
    with Probe.create_group().launch(cluster, placement, name="several", max_concurrency=two) as several:
        meet, greet = several.meet(str(tmp_path)), several.greet(str(tmp_path))
        assert meet.wait() == ["meet"]
        assert greet.wait() == ["greet"]


def test_scatter_gives_each_rank_its_share(group: WorkerGroup[Probe]) -> None:
    assert group.share.scatter([1, 2, 3, 4], name=list("abcd")).wait() == ["a1", "b2", "c3", "d4"]
    with pytest.raises(ValueError, match="3 items for 4 workers"):
        group.share.scatter([1, 2, 3])


def test_an_exception_keeps_its_type_and_fields(group: WorkerGroup[Probe]) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        group.fail(2).wait()
    (error,) = caught.value.exceptions
    # `except*` sees the user's type.
    assert isinstance(error, OurError)
    assert error.code == 3
    assert caught.value.ranks == (2,)
    assert "raise OurError" in "".join(error.__notes__)
    assert group.rank().wait() == [10, 11, 12, 13]


def test_an_exception_that_cannot_travel_becomes_a_remote_error(group: WorkerGroup[Probe]) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        group.fail(0, "lock").wait()
    (error,) = caught.value.exceptions
    assert isinstance(error, RemoteError)
    assert "holds a lock" in str(error)


@pytest.mark.parametrize("awaited", [False, True])
def test_a_failure_is_told_while_other_ranks_still_work(stuck: WorkerGroup[Probe], awaited: bool) -> None:
    handle = stuck.fail_while_others_work()
    with pytest.raises(WorkerGroupError, match="rank 1 is broken"):
        asyncio.run(handle.async_wait()) if awaited else handle.wait()


def test_who_stops_awaiting_can_wait_again(group: WorkerGroup[Probe]) -> None:
    handle = group.timed(0.3)

    async def give_up() -> None:
        await asyncio.wait_for(handle.async_wait(), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    # The answers come when the loop that awaited them is closed.
    assert handle.wait(20) == [0, 1, 2, 3]


def test_an_unknown_method_says_what_was_meant(group: WorkerGroup[Probe]) -> None:
    with pytest.raises(AttributeError, match="did you mean `coroutine`"):
        group.corutine()


def test_timers_are_those_of_the_call(group: WorkerGroup[Probe]) -> None:
    handle = group.timed(0.01)
    assert handle.wait() == [0, 1, 2, 3]
    durations = handle.consume_durations()
    assert set(durations) == {"outer", "inner"}
    assert 0.04 <= durations["inner"] <= durations["outer"] < 5
    per_rank = handle.consume_durations(return_per_rank=True)
    assert [set(item) for item in per_rank] == [{"outer", "inner"}] * 4
    assert group.rank().consume_durations() == {}


def test_a_timeout_names_who_has_not_answered(stuck: WorkerGroup[Probe]) -> None:
    with pytest.raises(TimeoutError, match="`stuck:0`"):
        stuck.execute_on(0).fail_while_others_work().wait(timeout=0.2)


def test_raising_constructor_fails_the_launch_without_processes(cluster: Cluster) -> None:
    with pytest.raises(WorkerGroupError, match="no camera") as caught:
        Probe.create_group(fail_on=1).launch(cluster, NodePlacementStrategy([0] * 2), name="broken")
    assert caught.value.ranks == (1,)
    assert caught.value.method == "__init__"
    with Probe.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="broken") as again:
        assert again.rank().wait() == [0, 1]


def test_a_failure_that_nobody_waited_for_fails_the_shutdown(cluster: Cluster) -> None:
    launched = Probe.create_group().launch(cluster, NodePlacementStrategy([0]), name="unseen")
    launched.fail(0)
    launched.rank().wait()
    with pytest.raises(WorkerGroupError, match="bad batch"):
        launched.shutdown()


def test_shutdown_reads_an_answer_that_ray_delivers_late(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Probe.create_group().launch(cluster, NodePlacementStrategy([0]), name="overtaken")
    handle = launched.fail(0)
    launched.rank().wait()
    known, arrived = handle._failures, []

    def failures(grace: float) -> dict[int, Exception]:
        if arrived:
            return known(grace)
        arrived.append(True)
        return {}

    def pending() -> list[WorkerAddress]:
        return [] if arrived else [WorkerAddress("overtaken", 0)]

    # As if the answer arrived just after the shutdown had looked for it for the first time.
    monkeypatch.setattr(handle, "_failures", failures)
    monkeypatch.setattr(handle, "pending", pending)
    with pytest.raises(WorkerGroupError, match="bad batch"):
        launched.shutdown()


def test_a_call_that_lost_a_group_shut_down_before_is_no_failure(cluster: Cluster) -> None:
    sender, receiver = (Listener.create_group().launch(cluster, name=name) for name in ("heard", "hears"))
    call = receiver.hear_two("heard")
    sender.say("hears").wait()
    sender.shutdown()
    until(lambda: not call.pending())
    receiver.shutdown()  # raises the failure of a call that nobody waited for, unless a shutdown made it fail
    assert isinstance(call.failure(), WorkerGroupError)
    assert "heard" in str(call.failure())


def test_shutdown_is_silent_about_calls_that_it_interrupts(cluster: Cluster) -> None:
    launched = Probe.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="interrupted")
    handle = launched.execute_on(0).wait_for_peer("interrupted", 1)
    launched.rank()
    launched.shutdown()
    assert isinstance(handle.failure(), WorkerGroupError)


def test_a_name_is_taken_once(cluster: Cluster, group: WorkerGroup[Probe]) -> None:
    with pytest.raises(RuntimeFailure, match="a group named `probe` is running"):
        Probe.create_group().launch(cluster, NodePlacementStrategy([0]), name="probe")


def test_a_group_is_found_by_its_name(group: WorkerGroup[Probe]) -> None:
    result = WorkerGroup.from_group_name(Probe, "probe")
    assert result.world_size == 4
    assert result.rank().wait() == [10, 11, 12, 13]
    with pytest.raises(UnknownGroupError, match="did you mean `probe`"):
        WorkerGroup.from_group_name(Probe, "prob")


def test_a_method_named_like_one_of_the_group_is_refused() -> None:
    class Clash(Worker):
        def launch(self) -> None: ...

    with pytest.raises(InvalidNameError, match=r"Clash\.launch"):
        Clash.create_group()


def test_a_worker_made_by_hand_says_so() -> None:
    with pytest.raises(RuntimeFailure, match="is not a process of a group"):
        _ = Probe.__new__(Probe).worker_address


class Sibling(Worker):
    def greet(self, group: str) -> object:
        self.send("hello", group, 1)
        return self.recv(group, 1)


class Greeted(Worker):
    def host(self) -> tuple[str, object]:
        with Answerer.create_group().launch(Cluster(), "0:0-1") as nested:
            return str(nested.addresses[1]), nested.answer(f"{self.worker_address.root_group_name}_sibling").wait()[1]


class Answerer(Worker):
    def answer(self, group: str) -> object:
        if self.rank == 0:
            return None
        request = self.recv(group, 0)
        self.send(f"{request} from {self.worker_address}", group, 0)
        return request


def test_nested_workers_have_addresses_below_their_parent(cluster: Cluster) -> None:
    with (
        Greeted.create_group().launch(cluster, "0:0", name="hosts") as hosts,
        Sibling.create_group().launch(cluster, "0", name="hosts_sibling") as siblings,
    ):
        hosting = hosts.host()
        assert siblings.greet("hosts:0").wait() == ["hello from hosts:0:1"]
        assert hosting.wait() == [("hosts:0:1", "hello")]


def test_rank_map_of_a_file_places_a_group(cluster: Cluster) -> None:
    with Probe.create_group(1).launch(cluster, "0:0-1", name="mapped") as group:
        assert [(info.rank, info.node_id) for info in group.worker_info_list] == [(0, 0), (1, 0)]
    with Probe.create_group(1).launch(cluster, {"placement": "0", "node_group": "node"}, name="mapped") as group:
        assert group.world_size == 1
    with pytest.raises(PlacementError, match="placement of `mapped`"):
        Probe.create_group(1).launch(cluster, "mapped", name="mapped")


class OtherProbe(Probe):
    pass


def test_groups_that_are_launched_together_run_all_or_not_at_all(cluster: Cluster) -> None:
    one, two, broken = Probe.create_group(1), OtherProbe.create_group(2), OtherProbe.create_group(fail_on=0)
    with pytest.raises(WorkerGroupError, match="no camera"):
        launch_together(cluster, {one: NodePlacementStrategy([0]), broken: None})
    assert (one.world_size, broken.world_size) == (0, 0)
    # The names are free again.
    launch_together(cluster, {one: NodePlacementStrategy([0]), two: NodePlacementStrategy([0])})
    with one, two:
        assert (one.rank().wait(), two.rank().wait()) == ([1], [2])


def test_channels_start_with_the_groups_launched_with_them(cluster: Cluster) -> None:
    one, broken = Probe.create_group(1), OtherProbe.create_group(fail_on=0)
    with pytest.raises(WorkerGroupError, match="no camera"):
        launch_together(cluster, {one: NodePlacementStrategy([0]), broken: None}, channels=["of-broken"])
    with pytest.raises(ChannelClosed):
        Channel.connect("of-broken").get()
    with pytest.raises(InvalidNameError):
        launch_together(cluster, {one: NodePlacementStrategy([0])}, channels=["twice", "twice"])
    assert one.world_size == 0
    (channel,) = launch_together(cluster, {one: NodePlacementStrategy([0])}, channels=["early"])
    with one:
        channel.put("there")
        assert Channel.connect("early").get() == "there"
    channel.close()
