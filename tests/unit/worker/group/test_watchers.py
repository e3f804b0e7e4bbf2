"""The looks of who waits for workers: a process that all depend on is named, and so are stopped ones."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf_core.cluster import engine
from rlinf_core.collective.endpoint_info import own_place
from rlinf_core.errors import WorkerDiedError
from rlinf_core.process.proc import MARK, stat
from rlinf_core.worker.group import watchers
from rlinf_core.worker.group.watchers import WaitWatch, fallen_watcher
from tests.waiting import until

MANAGER = WorkerDiedError("manager", node="this machine", cause="it closed the connection")
RAYLET = WorkerDiedError("raylet", node="this machine", cause="it ended with exit code 0")


def see(monkeypatch: pytest.MonkeyPatch, manager: WorkerDiedError | None, *ray: WorkerDiedError | None) -> None:
    """Have a manager found dead, and processes of Ray at one look after another."""
    looks = iter(ray)
    last = ray[-1] if ray else None
    monkeypatch.setattr(watchers, "current_client", lambda: SimpleNamespace(lost_manager=lambda: manager))
    monkeypatch.setattr(engine, "fallen", lambda: next(looks, last))


def test_nothing_is_named_while_all_live(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, None, None)
    assert fallen_watcher() is None
    WaitWatch().look()


def test_manager_is_named_where_ray_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "_ENGINE_SECONDS", 0.0)
    see(monkeypatch, MANAGER, None)
    assert fallen_watcher() is MANAGER


def test_raylet_that_ends_after_the_manager_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "_ENGINE_SECONDS", 60.0)
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
        monkeypatch.setattr(watchers, "current_client", lambda: client)
        yield parent.pid, child
        for pid in (child, parent.pid):
            os.kill(pid, signal.SIGKILL)


def looked(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    watch = WaitWatch()
    began = time.monotonic()
    monkeypatch.setattr(watchers.time, "monotonic", lambda: began + 6)
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
