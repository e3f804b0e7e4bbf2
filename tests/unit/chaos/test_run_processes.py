"""Signals to processes of a run: to those that are certainly its own, and no others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_core.cluster import driver_folder
from rlinf_core.node.process_identity import identity_here, own_identity, send
from rlinf_core.process.proc import MARK
from tests.chaos.fault_table import Target
from tests.chaos.run_processes import RunProcess, RunProcesses

SLEEP = "import sys, time; print(flush=True); time.sleep(600)"


def sleeping(title: str, **environ: str) -> subprocess.Popen[bytes]:
    """A process with a title in its command line, once it runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEP, title], env={**os.environ, **environ}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The private folder of this process as a driver."""
    monkeypatch.setattr(driver_folder, "base_folder", lambda: tmp_path)
    own = tmp_path / "driver"
    own.mkdir()
    (own / "owner").write_text(json.dumps(own_identity()._asdict()))
    return own


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_kinds_are_known_by_title(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    titles = {
        "gcs/gcs_server": Target.GCS_SERVER,
        "raylet/raylet": Target.RAYLET,
        "log_monitor.py": Target.LOG_MONITOR,
        "ray::ManagerProcess": Target.MANAGER,
        "ray::RuntimeEnvAgent": Target.RAY_AGENT,
    }
    pids: dict[Target, int] = {}
    for title, target in titles.items():
        started.append(sleeping(title, **{MARK: str(folder)}))
        pids[target] = started[-1].pid
    started.append(sleeping("raylet/raylet", **{MARK: "another's"}))
    processes = RunProcesses(own_identity(), {})
    for target, pid in pids.items():
        assert [process.identity.pid for process in processes.of(target)] == [pid]
    assert processes.of(Target.WORKER) == []
    assert [process.identity.pid for process in processes.of(Target.DRIVER)] == [os.getpid()]


def test_process_of_another_run_is_not_held(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    started.append(sleeping("raylet/raylet", **{MARK: "another's"}))
    other = RunProcess("raylet", Target.RAYLET, identity_here(started[0].pid))
    with RunProcesses(own_identity(), {}).held(other) as handle:
        assert handle is None


def test_reused_pid_is_not_held(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    started.append(sleeping("raylet/raylet", **{MARK: str(folder)}))
    earlier = identity_here(started[0].pid)._replace(start=f"{started[0].pid}:1")
    with RunProcesses(own_identity(), {}).held(RunProcess("raylet", Target.RAYLET, earlier)) as handle:
        assert handle is None


def test_own_process_is_killed(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    started.append(sleeping("raylet/raylet", **{MARK: str(folder)}))
    processes = RunProcesses(own_identity(), {})
    (raylet,) = processes.of(Target.RAYLET)
    with processes.held(raylet) as handle:
        assert handle is not None
        send(handle, signal.SIGKILL)
    assert started[0].wait() == -signal.SIGKILL
    assert processes.of(Target.RAYLET) == []
