"""Real deadlocks are named, circular work never is; a failure that others follow from is told first."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.channel.channel import Channel
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import DeadlockError, PayloadError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.worker.worker import Worker
from rlinf_core.worker.worker_group import WorkerGroup


class Knot(Worker):
    def take_from_the_next(self) -> Any:
        return self.recv("knot", (self._rank + 1) % self._world_size)

    async def take_in_a_task(self) -> Any:
        return await self.recv("knot", (self._rank + 1) % self._world_size, async_op=True).async_wait()

    def take(self, rank: int) -> Any:
        return self.recv("knot", rank)

    def give(self, rank: int, value: int, after: float = 0.0) -> None:
        time.sleep(after)
        self.send(value, "knot", rank)

    def patient(self, timeout: float) -> Any:
        """Wait a while for the next one, and then give it what it waits for."""
        try:
            return self.recv("knot", (self._rank + 1) % self._world_size, timeout=timeout)
        except TimeoutError:
            self.send("here", "knot", (self._rank - 1) % self._world_size)
            return "gave"

    def call(self, name: str, method: str, rank: int) -> Any:
        return getattr(WorkerGroup.from_group_name(Knot, name).execute_on(rank), method)().wait()

    async def call_in_a_task(self, name: str, method: str, rank: int) -> Any:
        return await getattr(WorkerGroup.from_group_name(Knot, name).execute_on(rank), method)()

    def call_back(self) -> Any:
        return WorkerGroup.from_group_name(Knot, "knot").execute_on(0).nothing().wait()

    def nothing(self) -> None: ...


class Env(Worker):
    def run(self, steps: int) -> int:
        total = 0
        for _ in range(steps):
            self.send(total, "policy", self._rank)
            total += self.recv("policy", self._rank)
        return total


class Policy(Worker):
    def run(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.recv("environment", self._rank)
            time.sleep(seconds)
            self.send(1, "environment", self._rank)


@pytest.fixture(scope="module")
def knot(cluster: Cluster) -> WorkerGroup[Knot]:
    with Knot.create_group().launch(cluster, NodePlacementStrategy([0] * 3), name="knot") as group:
        yield group


@pytest.mark.parametrize("method", ["take_from_the_next", "take_in_a_task"])
def test_a_ring_of_receives_is_named_in_all_its_members(knot: WorkerGroup[Knot], method: str) -> None:
    # A call of the whole group names those that fail within half a second of the first.
    for call in [getattr(knot.execute_on(rank), method)() for rank in range(3)]:
        with pytest.raises(WorkerGroupError) as caught:
            call.wait(timeout=60)
        (error,) = caught.value.exceptions
        assert isinstance(error, DeadlockError)
        assert error.members == ("knot:0", "knot:1", "knot:2")
        assert "knot:2 waits in recv from knot:0" in error.picture


@pytest.mark.nightly
def test_a_part_of_a_group_can_be_stuck_while_the_rest_works(knot: WorkerGroup[Knot]) -> None:
    first, second = knot.execute_on(0).take(1), knot.execute_on(1).take(0)
    works = knot.execute_on(2).give(2, 1, after=6.0)
    with pytest.raises(WorkerGroupError) as caught:
        first.wait(timeout=60)
    (error,) = caught.value.exceptions
    assert isinstance(error, DeadlockError)
    assert error.members == ("knot:0", "knot:1")
    with pytest.raises(WorkerGroupError):
        second.wait(timeout=60)
    works.wait(timeout=60)
    assert knot.execute_on(2).take(2).wait(timeout=20) == [1]


def test_driver_that_waits_for_the_stuck_worker_gets_a_deadlock(knot: WorkerGroup[Knot]) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        knot.execute_on(0).take(1).wait()
    (error,) = caught.value.exceptions
    assert isinstance(error, DeadlockError)
    assert "knot:1 is idle" in error.picture
    assert "driver waits for `knot.take()`" in error.picture


@pytest.mark.nightly
def test_a_driver_that_will_go_on_may_wake_it(knot: WorkerGroup[Knot]) -> None:
    handle = knot.execute_on(0).take(1)
    with pytest.raises(TimeoutError):
        handle.wait(timeout=4)
    knot.execute_on(1).give(0, 7).wait()
    assert handle.wait() == [7]


@pytest.mark.nightly
def test_a_call_that_is_under_way_may_wake_it(knot: WorkerGroup[Knot]) -> None:
    """The giver is called through an argument that comes late: until then it is idle."""
    import ray

    @ray.remote(num_cpus=0)
    def late() -> float:
        time.sleep(4)
        return 0.0

    handle = knot.execute_on(0).take(1)
    inputs = knot.execute_on(1).give(0, 8, late.remote())
    assert handle.wait() == [8]
    inputs.wait()


@pytest.mark.nightly
def test_a_wait_with_a_time_of_its_own_is_no_deadlock(knot: WorkerGroup[Knot]) -> None:
    patient, waiting = knot.execute_on(0).patient(4.0), knot.execute_on(2).take(0)
    assert waiting.wait() == ["here"]
    assert patient.wait() == ["gave"]


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["call", "call_in_a_task"])
def test_workers_that_call_each_other(knot: WorkerGroup[Knot], method: str) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        getattr(knot.execute_on(0), method)("knot", "call_back", 1).wait()
    assert "deadlock among `knot:0`, `knot:1`" in str(_innermost(caught.value))


def _innermost(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


@pytest.mark.nightly
def test_circular_work_that_goes_on_is_no_deadlock(cluster: Cluster) -> None:
    environments = Env.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="environment")
    policies = Policy.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="policy")
    with environments, policies:
        serving = policies.run(5, 1.6)
        assert environments.run(5).wait() == [5, 5]
        serving.wait()
        # Fast turns: whatever moment a look catches, everybody seems to wait.
        serving = policies.run(3000, 0.0)
        assert environments.run(3000).wait() == [3000, 3000]
        serving.wait()


SCRIPT = """
from rlinf_core import Channel, Cluster, Worker

class Producer(Worker):
    def run(self):
        self.connect_channel("frames").put("a frame")
        raise ValueError("camera unplugged")

class Consumer(Worker):
    def run(self):
        channel = self.connect_channel("frames")
        channel.get()
        channel.get()

with Cluster(num_nodes=1) as cluster:
    channel = Channel.create("frames")
    producer = Producer.create_group().launch(cluster, name="producer")
    consumer = Consumer.create_group().launch(cluster, name="consumer")
    producer.run()
    handle = consumer.run()
    {wait}
"""


class Producer(Worker):
    def run(self, channel: str) -> None:
        self.connect_channel(channel).put("a frame")
        raise ValueError("camera unplugged")

    def lock(self) -> Any:
        return threading.Lock()

    def fine(self) -> str:
        return "fine"


class Consumer(Worker):
    def run(self, channel: str) -> Any:
        connected = self.connect_channel(channel)
        connected.get()
        return connected.get()


def test_deadlock_is_raised_from_its_first_failure(cluster: Cluster) -> None:
    channel, run = f"frames-{uuid.uuid4().hex}", uuid.uuid4().hex
    with (
        Producer.create_group().launch(cluster, name=f"producer-{run}") as producer,
        Consumer.create_group().launch(cluster, name=f"consumer-{run}") as consumer,
    ):
        Channel.create(channel)
        producer.run(channel)
        with pytest.raises(WorkerGroupError) as caught:
            consumer.run(channel).wait()
        (error,) = caught.value.exceptions
        assert isinstance(error, DeadlockError)
        assert f"producer-{run}:0 is idle since its `run` raised ValueError: camera unplugged" in error.picture
        cause = caught.value.__cause__
        assert isinstance(cause, WorkerGroupError)
        assert (cause.group, cause.method) == (f"producer-{run}", "run")
        assert isinstance(cause.exceptions[0], ValueError)


@pytest.mark.nightly
@pytest.mark.parametrize("wait", ["handle.wait()", "[channel.get(timeout=20) for _ in range(2)]"])
def test_a_script_prints_the_first_cause_first(tmp_path: Path, wait: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(wait=wait))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 1
    assert "the direct cause of the following exception" in done.stderr, done.stderr
    first, then = done.stderr.split("The above exception was the direct cause", 1)
    assert "ValueError: camera unplugged" in first
    assert "Traceback (most recent call last):\n    |   File" in first, "where the user's own method raised"
    assert "rlinf_core/worker/process.py" not in first
    assert "followed from the failure of `producer:0` in `run`" in then
    assert "DeadlockError" in then or "CommunicationTimeoutError" in then


def test_a_result_that_does_not_pickle_is_told_as_one(cluster: Cluster) -> None:
    with Producer.create_group().launch(cluster, name=f"producer-{uuid.uuid4().hex}") as group:
        with pytest.raises(WorkerGroupError) as caught:
            group.lock().wait()
        (error,) = caught.value.exceptions
        assert isinstance(error, PayloadError)
        assert error.message == "the result of `lock` cannot be sent"
        assert error.where == str(group.addresses[0])
        assert "lock" in (error.why or "")
        assert group.fine().wait() == ["fine"]
