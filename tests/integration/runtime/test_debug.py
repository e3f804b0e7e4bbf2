"""rlinf ps of a job that runs, from another process: who waits for whom, stacks, breakpoints."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.context import current_session
from rlinf_core.errors import CommunicationTimeoutError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.node.stacks import py_spy
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.worker.worker import Worker
from rlinf_core.worker.worker_group import WorkerGroup
from tests.waiting import until

pexpect: Any = pytest.importorskip("pexpect")

RLINF = Path(sys.executable).with_name("rlinf")
HANGS = """
from rlinf_core.node import stacks
import time
stacks.register()
def wait_for_the_physics():
    print("ready", flush=True)
    while True:
        time.sleep(1000)
wait_for_the_physics()
"""


class Debugged(Worker):
    def hold_the_lock(self, ready: Path) -> None:
        """Wait in native code that holds the interpreter's lock."""
        library = ctypes.PyDLL(None)
        lock = ctypes.create_string_buffer(128)
        library.pthread_mutex_lock(lock)
        ready.touch()
        library.pthread_mutex_lock(lock)

    def start_child(self) -> int:
        self.child = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE)
        assert self.child.stdout is not None
        self.child.stdout.readline()
        return self.child.pid

    def end_child(self) -> None:
        self.child.kill()
        self.child.wait()

    def stop_and_send(self, value: int) -> int:
        breakpoint()  # noqa: T100 - what is tested
        value = value + 1
        self.send(value, "debugged", 1)
        return value

    def receive(self, timeout: float) -> int:
        return self.recv("debugged", 0, timeout=timeout)


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> Iterator[WorkerGroup[Debugged]]:
    """Two workers that tests leave idle."""
    with Debugged.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="debugged") as launched:
        yield launched


@pytest.fixture
def held(cluster: Cluster) -> Iterator[WorkerGroup[Debugged]]:
    """Two workers, the first of which a test may hold up for ever."""
    with Debugged.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="held") as launched:
        yield launched


def ours() -> tuple[str, str]:
    """Name this process's job: the youngest one of the machine, the default, may be somebody else's."""
    session = current_session()
    assert session is not None
    return "--job", session.job


def words(*arguments: str) -> list[str]:
    return ["ps", "--attach", *ours(), *arguments]


def debug(*arguments: str) -> tuple[int, dict[tuple[str, bool], dict[str, Any]]]:
    """Return the exit code, and the processes by name and whether a worker started them."""
    command = [RLINF, *words(*arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    record = json.loads(done.stdout)
    assert record["schema"] == "rlinf.debug/1"
    return done.returncode, {(one["name"], one["parent"] is not None): one for one in record["processes"]}


def test_worker_that_holds_the_lock_shows_its_line(held: WorkerGroup[Debugged], tmp_path: Path) -> None:
    held.execute_on(0).hold_the_lock(tmp_path / "ready")
    until(lambda: (tmp_path / "ready").exists())
    code, processes = debug("held", "driver")
    busy, idle = processes["held:0", False], processes["held:1", False]
    assert busy["state"] == "silent"
    assert busy["source"] == ("py-spy" if py_spy() else "signal")
    # py-spy names the class of a method.
    place = re.escape(f'File "{__file__}", line {line_of("library.pthread_mutex_lock(lock)", 2)}, in ')
    assert re.search(rf"{place}(Debugged\.)?hold_the_lock", busy["stacks"])
    assert (bool(idle["stacks"]), idle["reason"]) == (True, "")
    assert "thread MainThread" in processes["driver", False]["stacks"]
    assert code == 0, [(name, process["reason"]) for name, process in processes.items()]


@pytest.mark.skipif(py_spy() is None, reason="py-spy is not installed")
def test_native_frames_are_named(held: WorkerGroup[Debugged], tmp_path: Path) -> None:
    held.execute_on(0).hold_the_lock(tmp_path / "ready")
    until(lambda: (tmp_path / "ready").exists())
    _, processes = debug("held:0", "--native")
    assert "pthread_mutex_lock" in processes["held:0", False]["stacks"]


def test_hung_child_of_a_worker_is_shown(group: WorkerGroup[Debugged]) -> None:
    pid = group.execute_on(0).start_child().wait()[0]
    code, processes = debug("debugged:0")
    child = processes["debugged:0", True]
    assert (child["pid"], child["parent"]) == (pid, processes["debugged:0", False]["pid"])
    assert "in wait_for_the_physics" in child["stacks"]
    assert code == 0
    group.execute_on(0).end_child().wait()


def test_breakpoint_is_reached_and_left(group: WorkerGroup[Debugged]) -> None:
    sent = group.execute_on(0).stop_and_send(41)
    received = group.execute_on(1).receive(1.5)
    place = f"test_debug.py:{line_of('value = value + 1', 1)}"
    until(lambda: place in debug("debugged:0")[1]["debugged:0", False]["doing"])
    terminal = attached()
    assert "value = value + 1" in terminal.before
    # The other worker's time limit passes meanwhile.
    until(lambda: debug("debugged:1")[1]["debugged:1", False]["since"] > 2)
    terminal.sendline("p value * 2")
    terminal.expect_exact("82")
    terminal.sendline("n")
    terminal.expect_exact("self.send")
    terminal.sendeof()
    terminal.expect_exact("still waits")
    terminal.expect(pexpect.EOF)
    assert terminal.wait() == 0
    terminal = attached()
    terminal.sendline("c")
    terminal.expect_exact("continues")
    assert terminal.wait() == 0
    assert (sent.wait(), received.wait()) == ([42], [42])


def test_waits_expire_once_no_breakpoint_is_waited_at(group: WorkerGroup[Debugged]) -> None:
    with pytest.raises(WorkerGroupError) as failed:
        group.execute_on(1).receive(1.0).wait()
    assert isinstance(failed.value.exceptions[0], CommunicationTimeoutError)


def attached() -> Any:
    terminal = pexpect.spawn(
        str(RLINF), words("debugged:0"), timeout=60, encoding="utf-8", env={**os.environ, "TERM": "dumb"}
    )
    terminal.expect_exact("(rlinf)")
    return terminal


def line_of(code: str, count: int) -> int:
    """Return the number of the line that contains `code` for this time."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, start=1) if line.strip() == code][count - 1]


ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Waiter(Worker):
    def wait_for_the_next(self) -> str:
        return self.recv("waiter", (self._rank + 1) % self._world_size, timeout=100)

    def answer(self) -> None:
        self.send("go on", "waiter", (self._rank - 1) % self._world_size)

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def job(cluster: Cluster) -> Any:
    with Waiter.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="waiter") as group:
        pids = group.pid().wait()
        handle = group.execute_on(0).wait_for_the_next()
        yield cluster, pids
        group.execute_on(1).answer().wait()
        assert handle.wait() == ["go on"]


def inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    chosen = () if "--job" in arguments else ours()
    return subprocess.run([RLINF, "ps", *chosen, *arguments], capture_output=True, text=True, timeout=60, check=False)


def when_it_waits(*arguments: str) -> dict[str, dict[str, Any]]:
    """Return the workers by name, once the call has arrived. On a busy machine one may answer too late to be shown."""
    deadline = time.monotonic() + 20
    while True:
        done = inspect("--json", *arguments)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        assert record["schema"] == "rlinf.workers/1"
        workers = {worker["name"]: worker for worker in record["workers"]}
        answered = workers["waiter:1"]["state"] == "ready"
        if (workers["waiter:0"]["waits_for"] and answered) or time.monotonic() > deadline:
            return workers


def test_it_tells_who_waits_for_whom(job: Any) -> None:
    cluster, pids = job
    workers = when_it_waits()
    assert next(iter(workers)) == "driver"
    assert workers["driver"]["pid"] == os.getpid()
    first, second = workers["waiter:0"], workers["waiter:1"]
    assert [first["pid"], second["pid"]] == pids
    assert first["doing"] == "waits in recv from waiter:1"
    assert first["waits_for"] == ["waiter:1"]
    assert first["since"] >= 0
    assert first["node"] == f"node 0 ({cluster.get_node_ip(0)})"
    assert (first["node_rank"], first["device"], first["state"]) == (0, "cpu", "ready")
    assert second["doing"].startswith("is idle since its `"), second["doing"]


def test_in_a_pipe_each_process_is_one_line(job: Any) -> None:
    when_it_waits()
    lines = inspect().stdout.splitlines()
    assert lines[0].startswith("job rlinf-")
    assert lines[1].split() == ["WORKER", "NODE", "PID", "DEVICE", "SINCE", "DOES"]
    assert any(line.startswith("waiter:0 ") and line.endswith("waits in recv from waiter:1") for line in lines)


def test_the_table_fits_a_terminal(job: Any) -> None:
    child = pexpect.spawn(
        str(RLINF),
        ["ps", *ours()],
        dimensions=(200, 80),
        timeout=60,
        encoding="utf-8",
        env=dict(os.environ),
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    lines = [ESCAPE.sub("", line) for line in child.before.splitlines()]
    assert any(line.startswith("waiter:1 ") for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_job_that_does_not_run(job: Any) -> None:
    done = inspect("--job", "nothing")
    assert done.returncode == 3
    assert "no job named `nothing` is running" in done.stderr


def test_the_record_of_a_job_is_its_users_only(job: Any) -> None:
    from rlinf_core.cluster.engine import base_folder

    records = [folder / "job" for folder in base_folder().iterdir() if (folder / "job").exists()]
    assert records
    assert {record.stat().st_mode & 0o777 for record in records} == {0o600}


def test_without_any_job() -> None:
    # A folder of a longer path, as pytest's own, is left for the one of all jobs.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        done = subprocess.run(
            [RLINF, "ps"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TMPDIR": folder},
        )
    assert done.returncode == 3
    assert "no job is running" in done.stderr
