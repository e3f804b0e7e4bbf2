"""A group of workers: how it starts, its handles, and who watches it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.address import WorkerAddress
from rlinf_core.cluster import engine
from rlinf_core.collective.endpoint_info import own_place
from rlinf_core.errors import InvalidNameError, PlacementError, WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.process.proc import MARK, stat
from rlinf_core.topology import ClusterTopology, NodeInfo
from rlinf_core.worker import calls as worker_calls
from rlinf_core.worker import handle
from rlinf_core.worker.calls import GroupMember
from rlinf_core.worker.handle import WaitWatch, WorkerGroupHandle, fallen_watcher, wait_together
from rlinf_core.worker.launch import WAVE, base_address, waves
from rlinf_core.worker.worker import Worker
from tests.waiting import until


@pytest.mark.parametrize("name", ["send", "recv", "log_info", "timer", "worker_info", "torch_device", "broadcast"])
def test_a_method_named_like_one_of_every_worker_is_refused(name: str) -> None:
    def method(self: Worker, value: int) -> int:
        return value

    clash = type("Clash", (Worker,), {name: method})
    derived = type("Derived", (clash,), {})
    for item in (clash, derived):
        with pytest.raises(InvalidNameError, match=f"`Clash.{name}` cannot be called on a group") as caught:
            item.create_group()
        assert caught.value.why == f"it would replace the `{name}` of every worker"


def test_a_value_cannot_replace_a_method_of_every_worker() -> None:
    with pytest.raises(InvalidNameError, match=r"it would replace the `send` of every worker"):
        type("Clash", (Worker,), {"send": 5}).create_group()


def test_a_mixin_cannot_replace_what_workers_have() -> None:
    class Mixin:
        def send(self, value: int) -> None: ...

    class Clash(Mixin, Worker):  # pyright: ignore[reportIncompatibleMethodOverride] - that is the clash
        pass

    with pytest.raises(InvalidNameError, match=r"Mixin\.send"):
        Clash.create_group()


def test_group_that_was_not_launched_says_so() -> None:
    assert repr(Worker.create_group()) == "<WorkerGroup of Worker, not running>"


def test_class_may_choose_its_groups_and_device() -> None:
    class Own(Worker):
        torch_device: Any = "cpu"

        @classmethod
        def create_group(cls, *args: Any, **kwargs: Any) -> Any:
            return super().create_group(*args, size=3, **kwargs)

        def learn(self) -> None: ...

    assert Own.create_group().world_size == 0


class Learner(Worker):
    def learn(self) -> None: ...


def test_a_group_lists_the_methods_that_can_be_called_on_it() -> None:
    group = Learner.create_group()
    assert {"learn", "launch", "execute_on", "world_size"} <= set(dir(group))
    assert "send" not in dir(group), "a group does not send; its workers do"
    assert group.methods == {"learn"}


@pytest.mark.parametrize(
    ("config", "section", "name"),
    [
        ({"actor": {"group_name": "Learners"}}, "actor", "Learners"),
        (SimpleNamespace(actor=SimpleNamespace(group_name="Learners")), "actor", "Learners"),
        ({"actor": {}}, "actor", "Worker_group_Mine"),
        ({"actor": {"group_name": "Learners"}}, "rollout", "Worker_group_Mine"),
        ({"actor": {"group_name": "Learners"}}, None, "Worker_group_Mine"),
    ],
)
def test_a_group_takes_its_name_from_the_section_that_is_its_own(config: Any, section: str | None, name: str) -> None:
    class Mine(Worker):
        config_section = section

    for arguments in (((config,), {}), ((3,), {"cfg": config})):
        assert str(base_address(Mine, arguments, None)) == name
        assert str(base_address(Mine, arguments, "given")) == "given"


def test_a_name_of_a_section_that_is_no_text_is_refused() -> None:
    class Mine(Worker):
        config_section = "actor"

    with pytest.raises(InvalidNameError, match="5 is not a valid name of a group"):
        base_address(Mine, (({"actor": {"group_name": 5}},), {}), None)


def test_a_group_runs_on_a_cluster_not_on_its_topology() -> None:
    class Mine(Worker): ...

    with pytest.raises(PlacementError, match=r"launch of `Worker_group_Mine`: .* is not a `Cluster`"):
        Mine.create_group().launch(ClusterTopology.from_nodes([NodeInfo(0)]))  # pyright: ignore[reportArgumentType]


class _Ray:
    """Results by reference: values, errors, or None while the call runs."""

    exceptions = ray.exceptions

    def __init__(self, **results: Any) -> None:
        self._results = results
        self.waited_in_vain = 0

    def wait(
        self, references: list[str], *, num_returns: int, timeout: float, fetch_local: bool
    ) -> tuple[list[str], list[str]]:
        ready = [reference for reference in references if self._results[reference] is not None]
        if timeout and len(ready) < num_returns:
            self.waited_in_vain += 1
        done = ready[:num_returns]
        return done, [reference for reference in references if reference not in done]

    def get(self, reference: str | list[str], timeout: float | None = None) -> Any:
        if isinstance(reference, list):
            return [self.get(one) for one in reference]
        result = self._results[reference]
        if isinstance(result, Exception):
            raise result
        return result


def test_failure_of_one_call_ends_the_wait_for_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _Ray(runs=None, fails=ray.exceptions.RayTaskError("step", "", ValueError("no such task")))
    for module in (worker_calls, handle):
        monkeypatch.setattr(module, "ray_api", lambda: fake)
    member = GroupMember(WorkerAddress("env", (0,)), None, "node 0", 1)
    calls: list[WorkerGroupHandle[Any]] = [
        WorkerGroupHandle("env", "step", 1, [member], [name]) for name in ("runs", "fails")
    ]
    with pytest.raises(WorkerGroupError, match="no such task"):
        wait_together(*calls)
    assert fake.waited_in_vain == 0


@given(st.lists(st.integers(0, 3), max_size=120))
def test_wave_starts_few_processes_per_node_until_all_run(nodes: list[int]) -> None:
    result = waves(nodes)
    for wave in result:
        assert 0 < max(Counter(nodes[index] for index in wave).values()) <= WAVE
    assert sorted(index for wave in result for index in wave) == list(range(len(nodes)))
    most = max(Counter(nodes).values(), default=0)
    assert len(result) == -(-most // WAVE)


MANAGER = WorkerDiedError("manager", node="this machine", cause="it closed the connection")
RAYLET = WorkerDiedError("raylet", node="this machine", cause="it ended with exit code 0")


def see(monkeypatch: pytest.MonkeyPatch, manager: WorkerDiedError | None, *ray: WorkerDiedError | None) -> None:
    """Have a manager found dead, and processes of Ray at one look after another."""
    looks = iter(ray)
    last = ray[-1] if ray else None
    monkeypatch.setattr(handle, "current_client", lambda: SimpleNamespace(lost_manager=lambda: manager))
    monkeypatch.setattr(engine, "fallen", lambda: next(looks, last))


def test_nothing_is_named_while_all_live(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, None, None)
    assert fallen_watcher() is None
    WaitWatch().look()


def test_manager_is_named_where_ray_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "_ENGINE_SECONDS", 0.0)
    see(monkeypatch, MANAGER, None)
    assert fallen_watcher() is MANAGER


def test_raylet_that_ends_after_the_manager_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "_ENGINE_SECONDS", 60.0)
    see(monkeypatch, MANAGER, None, None, RAYLET)
    with pytest.raises(WorkerDiedError) as raised:
        WaitWatch().look()
    assert raised.value is RAYLET


PARENT = "import subprocess, sys; c = subprocess.Popen(['sleep', '600']); print(c.pid, flush=True); c.wait()"


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A worker and a process that it has started, of a Ray of this driver."""
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setattr(engine, "current", lambda: SimpleNamespace(folder=tmp_path))
    monkeypatch.setattr(engine, "fallen", lambda: None)
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        peers = {"EnvGroup:0": SimpleNamespace(info=SimpleNamespace(pid=parent.pid, place=own_place()))}
        client = SimpleNamespace(lost_manager=lambda: None, snapshot=lambda: SimpleNamespace(peers=peers))
        monkeypatch.setattr(handle, "current_client", lambda: client)
        yield parent.pid, child
        for pid in (child, parent.pid):
            os.kill(pid, signal.SIGKILL)


def looked(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    watch = WaitWatch()
    began = time.monotonic()
    monkeypatch.setattr(handle.time, "monotonic", lambda: began + 6)
    with caplog.at_level(logging.WARNING, "rlinf.job"):
        watch.look()
    monkeypatch.undo()
    return caplog.messages


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def test_stopped_worker_is_named(
    family: tuple[int, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, _ = family
    stop(pid)
    assert looked(caplog, monkeypatch) == [
        f"`EnvGroup:0` (pid {pid}) is stopped, as by SIGSTOP; `kill -CONT {pid}` continues it"
    ]


def test_process_of_a_worker_is_named_with_it(
    family: tuple[int, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, child = family
    os.kill(child, signal.SIGSTOP)
    until(lambda: stat(child).is_stopped)
    (message,) = looked(caplog, monkeypatch)
    assert message.startswith(f"process {child}, which `EnvGroup:0` has started, is stopped, as by SIGSTOP;")


def test_processes_that_run_are_not_named(
    family: tuple[int, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert looked(caplog, monkeypatch) == []


def test_short_wait_looks_at_nothing(
    family: tuple[int, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(family[0])
    WaitWatch().look()
    assert caplog.messages == []
