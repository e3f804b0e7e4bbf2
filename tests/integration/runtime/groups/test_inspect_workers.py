"""`rlinf ps` on a job that runs, from another process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.context import current_session
from rlinf_core.placement.strategies import NodePlacementStrategy
from rlinf_core.worker.worker import Worker

pexpect: Any = pytest.importorskip("pexpect")

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
RLINF = Path(sys.executable).with_name("rlinf")


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


def ours() -> tuple[str, str]:
    """Name this process's job: the youngest one of the machine, the default, may be somebody else's."""
    session = current_session()
    assert session is not None
    return "--job", session.job


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
    from rlinf_core.cluster.driver_folder import base_folder

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
