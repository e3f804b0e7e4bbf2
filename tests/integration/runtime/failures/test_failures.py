"""What goes wrong between workers: who hears of it, how soon, and in which words; what holds a job up."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import (
    CancelledOperationError,
    CommunicationTimeoutError,
    DeadlockError,
    WorkerDiedError,
)
from rlinf_core.failures import WorkerGroupError
from rlinf_core.node.process_life import memory_kill
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.supervision.client import ManagerClient, current_client
from rlinf_core.supervision.job_view import held_up
from rlinf_core.worker import worker_group
from rlinf_core.worker.handle import WorkerGroupHandle
from rlinf_core.worker.worker import Worker
from rlinf_core.worker.worker_group import WorkerGroup, end_worker
from tests.kernel import KEEPS_ENDS
from tests.waiting import until


class Peer(Worker):
    def take(self, group: str, rank: int, timeout: float | None = None) -> Any:
        return self.recv(group, rank, timeout=timeout)

    async def take_in_a_task(self, group: str, rank: int) -> Any:
        return await self.recv(group, rank, async_op=True).async_wait()

    def fail_once_there_is(self, path: Path) -> None:
        while not path.exists():
            time.sleep(0.01)
        raise ValueError("the camera is unplugged")

    def give(self, value: Any, group: str, rank: int) -> None:
        self.send(value, group, rank)

    def end(self, how: str) -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "_exit":
            os._exit(3)
        elif how == "exit":
            sys.exit(4)
        elif how == "crash":
            ctypes.string_at(0)

    def use_memory(self) -> int:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, hard))
        return len(bytearray(64 << 30))

    def fill(self, size: int) -> int:
        return len(b"1" * size)

    def echo(self, value: Any) -> Any:
        return value

    def pid(self) -> int:
        return os.getpid()


def only_error(handle: WorkerGroupHandle[Any], timeout: float = 20) -> Exception:
    with pytest.raises(WorkerGroupError) as caught:
        handle.wait(timeout=timeout)
    (error,) = caught.value.exceptions
    return error


def until_it_waits(cluster: Cluster, name: str) -> None:
    """Return when the worker is in an operation."""
    from rlinf_core.supervision.job_view import views

    def waits() -> bool:
        return any(worker.name == name and worker.waits_for for worker in views(cluster.client.snapshot()))

    until(waits, f"a wait of {name}")


@pytest.fixture(scope="module")
def waiters(cluster: Cluster) -> WorkerGroup[Peer]:
    with Peer.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="waiters") as group:
        yield group


@pytest.fixture(scope="module")
def mortals(cluster: Cluster) -> Iterator[WorkerGroup[Peer]]:
    """Six workers, each of which one test ends."""
    with Peer.create_group().launch(cluster, NodePlacementStrategy([0] * 6), name="mortals") as group:
        yield group


@pytest.mark.parametrize(
    ("rank", "how", "cause"),
    [
        (0, "kill", "it was killed by SIGKILL" if KEEPS_ENDS else "killed, or exited without an exception"),
        (1, "_exit", r"it ended with exit code \d" if KEEPS_ENDS else "killed, or exited without an exception"),
        (2, "exit", r"it called `sys.exit\(4\)`"),
        (3, "crash", r"crashed: Segmentation fault(.|\n)*test_failures.py:\d+ in end"),
    ],
)
def test_a_death_reaches_who_waits_with_its_cause(
    cluster: Cluster, waiters: WorkerGroup[Peer], mortals: WorkerGroup[Peer], rank: int, how: str, cause: str
) -> None:
    waiting = waiters.execute_on(0).take("mortals", rank)
    until_it_waits(cluster, "waiters:0")
    ending = mortals.execute_on(rank).end(how)
    error = only_error(waiting)
    assert isinstance(error, WorkerDiedError)
    assert error.address == f"mortals:{rank}"
    assert error.node == f"node 0 ({cluster.get_node_ip(0)})"
    assert error.where == "waiters:0"
    with pytest.raises(WorkerDiedError, match=cause):
        raise error
    with pytest.raises(WorkerDiedError, match=cause):
        raise only_error(ending)


def test_who_comes_after_a_death_hears_of_it_at_once(
    cluster: Cluster, waiters: WorkerGroup[Peer], mortals: WorkerGroup[Peer]
) -> None:
    mortal = mortals.execute_on(4)
    (pid,) = mortal.pid().wait()
    with pytest.raises(WorkerGroupError) as caught:
        mortal.end("kill").wait(timeout=20)
    assert caught.value.places == {4: f"node 0 ({cluster.get_node_ip(0)}), pid {pid}"}
    assert isinstance(only_error(waiters.execute_on(1).take("mortals", 4)), WorkerDiedError)


def test_a_relaunched_group_is_reached_under_its_name(cluster: Cluster, waiters: WorkerGroup[Peer]) -> None:
    first = Peer.create_group().launch(cluster, NodePlacementStrategy([0]), name="phoenix")
    first.give("one", "waiters", 0).wait(timeout=20)
    assert waiters.execute_on(0).take("phoenix", 0).wait(timeout=20) == ["one"]
    with pytest.raises(WorkerGroupError):
        first.end("kill").wait(timeout=20)
    first.shutdown()
    with Peer.create_group().launch(cluster, NodePlacementStrategy([0]), name="phoenix") as second:
        second.give("two", "waiters", 0).wait(timeout=20)
        assert waiters.execute_on(0).take("phoenix", 0).wait(timeout=20) == ["two"]
        waiters.execute_on(0).give("back", "phoenix", 0).wait(timeout=20)
        assert second.take("waiters", 0).wait(timeout=20) == ["back"]


def test_memory_that_ends_is_an_error_of_its_own_type(waiters: WorkerGroup[Peer]) -> None:
    assert isinstance(only_error(waiters.execute_on(0).use_memory()), MemoryError)
    assert waiters.execute_on(0).echo(1).wait(timeout=20) == [1]


@pytest.fixture
def limited() -> Iterator[Callable[[int, int], None]]:
    """Puts a process under a limit of memory, which the kernel enforces."""
    # By either version of control groups.
    places = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
    group: Path | None = None
    for parent, limit in places:
        made = Path(parent) / f"rlinf-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        if (made / limit).exists():
            group = made
            break
        made.rmdir()
    if group is None:
        pytest.skip("needs root and a memory control group")

    def limit_to(pid: int, size: int) -> None:
        (group / limit).write_text(str(size))
        (group / "cgroup.procs").write_text(str(pid))

    yield limit_to
    deadline = time.monotonic() + 20
    while (group / "cgroup.procs").read_text().strip() and time.monotonic() < deadline:
        time.sleep(0.02)
    group.rmdir()


def test_who_is_killed_for_memory_is_told_to_have_been(
    cluster: Cluster, waiters: WorkerGroup[Peer], mortals: WorkerGroup[Peer], limited: Callable[[int, int], None]
) -> None:
    mortal = mortals.execute_on(5)
    waiting = waiters.execute_on(0).take("mortals", 5)
    until_it_waits(cluster, "waiters:0")
    (pid,) = mortal.pid().wait()
    limited(pid, 256 << 20)
    filling = mortal.fill(2 << 30)
    for handle in (waiting, filling):
        error = only_error(handle)
        assert isinstance(error, WorkerDiedError)
        end = error.end
        if KEEPS_ENDS:
            assert end is not None
            assert end.signal == "SIGKILL"
        # Said of this very process, where the kernel's log may be read; else nothing of memory is said.
        named = end is not None and end.out_of_memory is not None
        assert ("because memory ran out" in str(error)) == named
        assert named == (KEEPS_ENDS and bool(memory_kill(pid)))


def test_a_deadline_says_who_waits_for_whom(waiters: WorkerGroup[Peer]) -> None:
    error = only_error(waiters.execute_on(0).take("waiters", 1, timeout=0.3))
    assert isinstance(error, CommunicationTimeoutError)
    assert error.operation == "recv from waiters:1"
    assert error.picture is not None
    assert error.picture.startswith("waiters:0 waits in recv from waiters:1 for 0.")
    assert "waiters:1 is idle" in error.picture


def test_a_driver_that_gives_up_hears_who_waits_for_whom(cluster: Cluster, waiters: WorkerGroup[Peer]) -> None:
    handle = waiters.execute_on(0).take("waiters", 1)
    until_it_waits(cluster, "waiters:0")
    with pytest.raises(CommunicationTimeoutError, match=r"no answer from `waiters:0`(.|\n)*recv from waiters:1"):
        handle.wait(timeout=0.5)
    waiters.execute_on(1).give(5, "waiters", 0).wait(timeout=20)
    assert handle.wait(timeout=20) == [5]


@pytest.mark.parametrize("method", ["take", "take_in_a_task"])
def test_cancelling_wakes_the_blocked_and_drops_the_queued(
    cluster: Cluster, waiters: WorkerGroup[Peer], method: str
) -> None:
    view = waiters.execute_on(0)
    blocked = getattr(view, method)("waiters", 1)
    queued = view.echo(1)
    until_it_waits(cluster, "waiters:0")
    queued.cancel()
    blocked.cancel()
    assert isinstance(only_error(blocked), CancelledOperationError)
    assert isinstance(only_error(queued), CancelledOperationError)
    assert view.echo(2).wait(timeout=20) == [2]
    waiters.execute_on(1).give("for nobody else", "waiters", 0).wait(timeout=20)
    assert view.take("waiters", 1).wait(timeout=20) == ["for nobody else"]


def test_a_blocked_group_is_shut_down_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever computes would be given this long; these are woken.
    monkeypatch.setattr(worker_group, "_SHUTDOWN_SECONDS", 600.0)
    group = Peer.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="blocked")
    handles = [group.take("blocked", 1), group.take("blocked", 1)]
    until_it_waits(cluster, "blocked:0")
    group.shutdown()
    for handle in handles:
        with pytest.raises(WorkerGroupError) as caught:
            handle.wait(timeout=5)
        assert all(isinstance(error, CancelledOperationError | WorkerDiedError) for error in caught.value.exceptions)


def test_what_a_worker_makes_of_a_deadlock_is_the_answer(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    output = tmp_path / "told"
    with Peer.create_group().launch(cluster, NodePlacementStrategy([0]), name="knotted") as group:
        handle = group.fail_once_there_is(output)

        def failure(client: ManagerClient, serial: int) -> DeadlockError:
            # The caller hears of it while the worker, which hears of it too, has not failed yet.
            output.touch()
            ray.wait(list(handle.references))
            return DeadlockError(("driver",), "")

        monkeypatch.setattr(ManagerClient, "failure", failure)
        with pytest.raises(WorkerGroupError) as caught:
            handle.wait()
        assert str(caught.value.exceptions[0]) == "the camera is unplugged"


class Holder(Worker):
    def pid(self) -> int:
        return os.getpid()

    def hold(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


# By night `test_process_that_holds_a_run_up_is_named` has others: zombies, locks and hangs.
def test_holder_is_named_and_ended(cluster: Cluster) -> None:
    group: WorkerGroup[Any] = Holder.create_group().launch(cluster, name="Holder")
    client = current_client()
    assert client is not None
    with group:
        held = group.hold()
        until(lambda: held_up(client), "a holder", 20)
        (standing,) = held_up(client)
        assert (standing.name, "is stopped, as by SIGSTOP" in standing.how) == ("Holder:0", True), standing.how
        end_worker(group, 0, f"given up: {standing.how}")
        with pytest.raises(WorkerGroupError) as raised:
            held.wait(timeout=30)
    (error,) = raised.value.exceptions
    assert isinstance(error, WorkerDiedError)
    assert error.cause == f"given up: {standing.how}"
