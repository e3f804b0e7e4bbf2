"""Real deadlocks are named within seconds; circular work that goes on never is."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import DeadlockError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.worker.group.worker_group import WorkerGroup
from rlinf_core.worker.worker import Worker


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
    with pytest.raises(WorkerGroupError) as caught:
        getattr(knot, method)().wait(timeout=60)
    assert caught.value.ranks == (0, 1, 2)
    for error in caught.value.exceptions:
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


def test_a_driver_that_will_go_on_may_wake_it(knot: WorkerGroup[Knot]) -> None:
    handle = knot.execute_on(0).take(1)
    with pytest.raises(TimeoutError):
        handle.wait(timeout=4)
    knot.execute_on(1).give(0, 7).wait()
    assert handle.wait() == [7]


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
