"""What a driver leaves behind, however it ends: nothing. Each driver here is a process of its own, with its own Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import until

DRIVER = """
import sys, time
from rlinf_core import Cluster, NodePlacementStrategy, Worker, WorkerGroupError
from rlinf_core.errors import UnknownGroupError
from tests.waiting import until

class Broken(Exception):
    def __init__(self, joint):
        super().__init__(f"joint {joint} is broken")
        self.joint = joint

class W(Worker):
    def take(self, group, rank): return self.recv(group, rank)
    def fail(self): raise ValueError("bad batch")
    def break_joint(self): raise Broken(4 + self._rank)
    def echo(self, value): return value
    def ring(self, payload):
        self.send(payload, "w", 1 - self._rank)
        return len(self.recv("w", 1 - self._rank))

cluster = Cluster(num_nodes=1)
group = W.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="w")
assert group.ring(b"x" * 5_000_000).wait() == [5_000_000] * 2
how = sys.argv[1]
if how != "block":
    print("ready", flush=True)
    sys.stdin.read()  # until the test has read that: what it read beyond would be lost
if how == "block":
    try:
        print("ready", flush=True)
        group.execute_on(0).take("w", 1).wait(timeout=600)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise
elif how == "again":
    cluster.shutdown()
    cluster = Cluster(num_nodes=1)
    group = W.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="w")
    assert group.ring(b"x" * 1000).wait() == [1000] * 2
elif how == "raise":
    try:
        group.break_joint().wait()
    except* Broken as errors:
        print("broken", [error.joint for error in errors.exceptions], flush=True)
    group.fail().wait()
elif how == "unseen":
    group.fail()
    group.echo(1).wait()
elif how == "declared":
    cluster.declare_groups("w", "policy")
    try:
        group.execute_on(0).take("polisy", 0).wait(timeout=20)
    except* UnknownGroupError as errors:
        assert "did you mean `policy`" in str(errors.exceptions[0]), errors.exceptions
        print("unknown", flush=True)
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # Short, because unix sockets are made below it.
    base = Path(f"/tmp/rlinf-test-{os.getpid()}")
    base.mkdir()
    yield base
    subprocess.run(["rm", "-rf", str(base)], check=True)


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    script = folder / "driver.py"
    script.write_text(DRIVER)
    process = subprocess.Popen(
        [sys.executable, str(script), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", process.communicate(timeout=60)
    process.stdin.close()
    process.stdin = None  # `communicate` would flush it
    return process


def processes_of(folder: Path) -> list[str]:
    """Return the processes that were started below a folder: their environment names it."""
    mark = f"TMPDIR={folder}".encode()
    result: list[str] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                result.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return result


def until_none_is_left(folder: Path, seconds: float) -> None:
    until(lambda: not processes_of(folder), "the end of all processes", seconds)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.nightly
def test_one_cluster_after_another_leaves_nothing_either(folder: Path) -> None:
    """As a run does that starts again after a worker died."""
    process = start(folder, "again")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    until_none_is_left(folder, 20)
    assert [path for path in folder.rglob("*") if path.is_socket() or path.name in ("job", "token")] == []


def test_neither_a_killed_driver_nor_the_next_leaves_anything(folder: Path) -> None:
    before = shared_memory()
    process = start(folder, "block")
    process.kill()
    process.communicate(timeout=60)
    until_none_is_left(folder, 30)
    assert shared_memory() <= before
    following = start(folder, "return")
    _, err = following.communicate(timeout=60)
    assert following.returncode == 0, err
    until_none_is_left(folder, 20)
    assert [path for path in folder.rglob("*") if path.is_socket() or path.name in ("job", "token")] == []
    assert shared_memory() <= before


@pytest.mark.nightly
@pytest.mark.parametrize("whole_group", [False, True], ids=["driver", "process group"])
def test_a_driver_that_is_interrupted_ends_at_once(folder: Path, whole_group: bool) -> None:
    process = start(folder, "block")
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "interrupted" in out
    assert process.returncode == 130, err
    until_none_is_left(folder, 20)


@pytest.mark.nightly
def test_a_driver_that_is_terminated_shuts_down_and_says_so(folder: Path) -> None:
    process = start(folder, "block")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "SIGTERM received" not in err
    until_none_is_left(folder, 20)


def test_a_failure_is_the_drivers_exit_status(folder: Path) -> None:
    process = start(folder, "raise")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ValueError: bad batch" in err
    assert "broken [4, 5]" in out, "a type of the script itself survives"


@pytest.mark.nightly
def test_unseen_failure_sets_the_drivers_exit_status(folder: Path) -> None:
    process = start(folder, "unseen")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "bad batch" in err
    until_none_is_left(folder, 20)


@pytest.mark.nightly
def test_a_group_that_was_not_declared_fails_at_once(folder: Path) -> None:
    process = start(folder, "declared")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "unknown" in out
