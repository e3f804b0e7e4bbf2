"""Stopped processes are named while a driver waits, with who started them; others are not."""

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
from typing import Any

import pytest

from rlinf_core.cluster import engine
from rlinf_core.process.proc import MARK
from rlinf_core.worker.group import stopped
from rlinf_core.worker.group.stopped import StoppedWatch

PARENT = "import subprocess, sys; c = subprocess.Popen(['sleep', '600']); print(c.pid, flush=True); c.wait()"


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A worker and a process that it has started, of a Ray of this driver."""
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setattr(engine, "current", lambda: SimpleNamespace(folder=tmp_path))
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        monkeypatch.setattr(stopped, "_workers", lambda _: {parent.pid: "EnvGroup:0"})
        yield parent.pid, child
        for pid in (child, parent.pid):
            os.kill(pid, signal.SIGKILL)


def looked(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    client: Any = object()
    watch = StoppedWatch()
    began = time.monotonic()
    monkeypatch.setattr(stopped.time, "monotonic", lambda: began + 6)
    with caplog.at_level(logging.WARNING, "rlinf.job"):
        watch.look(client)
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
    while not stopped.stat(child).is_stopped:
        time.sleep(0.01)
    (message,) = looked(caplog, monkeypatch)
    assert message.startswith(f"process {child}, which `EnvGroup:0` has started, is stopped, as by SIGSTOP;")


def test_processes_that_run_are_not_named(
    family: tuple[int, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert looked(caplog, monkeypatch) == []


def test_short_wait_looks_at_nothing(
    family: tuple[int, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = object()
    stop(family[0])
    StoppedWatch().look(client)
    assert caplog.messages == []
