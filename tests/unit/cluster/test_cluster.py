"""A cluster, its job, the driver's folder and its exit status."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.cluster import cluster as module
from rlinf_core.cluster import driver_job, engine, joining
from rlinf_core.cluster import engine as folders
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.cluster.driver_job import cause_of
from rlinf_core.cluster.ray_process import kept_handler, own_signals
from rlinf_core.context import Session
from rlinf_core.errors import ClusterError, EnvironmentVariableError
from rlinf_core.node.process_life import ProcessIdentity, own_identity
from rlinf_core.process import proc
from rlinf_core.topology import ClusterTopology, NodeInfo
from tests.waiting import until


class ConnectedError(Exception):
    """Ray would be started now."""


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object, **__: object) -> None:
        raise ConnectedError

    monkeypatch.setattr(engine, "connect", connect)


def test_a_missing_interpreter_is_named_beside_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "session_folder", lambda: str(tmp_path))
    # A variable may hold bytes that are not UTF-8.
    command = joining.ProcessCommand.of({"MARK": "\udcff"}, str(tmp_path / "python"), "node 0")
    assert command is not None
    assert joining.prepare(command)[1] == "it does not exist"


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("name", "value"),
    [("RLINF_TIMEOUT", "-3"), ("RLINF_CALL_TIMEOUT", "inf"), ("RLINF_SHM_LIMIT", "lots"), ("RLINF_NET_IF", "none0")],
)
def test_a_wrong_variable_is_told_at_once(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentVariableError, match=f"`{name}` is `{value}`"):
        Cluster(num_nodes=1)


@pytest.mark.usefixtures("no_ray")
def test_a_variable_that_is_none_of_ours_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "current_session", lambda: None)
    module._warn_of_unknown.cache_clear()
    monkeypatch.setenv("RLINF_TIMOUT", "3")
    monkeypatch.setenv("RLINF_NET_IF", "lo")
    with caplog.at_level(logging.WARNING, logger="rlinf"):
        for _ in range(2):
            with pytest.raises(ConnectedError):
                Cluster(num_nodes=1)
    assert [record.getMessage() for record in caplog.records if "RLINF_TIMOUT" in record.getMessage()] == [
        "`RLINF_TIMOUT` in the environment is not a variable of rlinf; did you mean `RLINF_TIMEOUT`?"
    ]


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("num_nodes", [0, -1, "1", 1.5, True, [1]])
def test_what_is_no_number_of_nodes(num_nodes: Any) -> None:
    with pytest.raises(ClusterError, match=r"a cluster of .* nodes was requested"):
        Cluster(num_nodes)


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("node_rank", [-1, 1, "0", 0.0, None])
def test_what_is_no_node(node_rank: Any) -> None:
    cluster = object.__new__(Cluster)
    cluster.topology = ClusterTopology.from_nodes([NodeInfo(0)])
    assert cluster.get_node_info(0).rank == 0
    with pytest.raises(ClusterError, match="there is no node") as caught:
        cluster.get_node_info(node_rank)
    assert repr(node_rank) in str(caught.value)


@pytest.mark.usefixtures("no_ray")
def test_worker_that_leaves_its_cluster_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def end_all() -> list[Any]:
        ended.append("groups")
        return []

    monkeypatch.setattr(engine, "end_all", end_all)
    monkeypatch.setattr(engine, "disconnect", lambda: ended.append("connection") or [])
    entered: list[object] = []
    monkeypatch.setattr(module, "enter_session", entered.append)
    cluster = object.__new__(Cluster)
    cluster.session = Session("job", b"secret", member=WorkerAddress.from_name("env:0"))
    with cluster:
        pass
    assert (ended, entered) == (["groups"], [])


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A TMPDIR that is short enough for Ray's sockets, as that of the test itself is not."""
    # Made now: the folder that other tests' folders lie in must not be within the one that is removed here.
    tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory(prefix="rl", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def ray_processes(folder: Path) -> list[int]:
    """Return the processes of the embedded Ray of a driver's folder."""
    return proc.processes_of(str(folder), str(folder), engine_only=True)


def own_by(folder: Path, owner: ProcessIdentity) -> None:
    (folder / "owner").write_text(json.dumps(owner._asdict()))


@pytest.mark.usefixtures("temporary")
def test_a_folder_is_its_makers_while_it_lives() -> None:
    folder = folders.new_folder()
    assert folders.is_owned(folder)
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    # Not taken away by the next driver.
    assert folders.new_folder() != folder
    assert folder.is_dir()


@pytest.mark.usefixtures("temporary")
def test_folder_of_a_dead_process_is_removed_at_the_next_start() -> None:
    code = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]; from rlinf_core.cluster import engine as folders;"
        "print(folders.new_folder())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tempfile.gettempdir()], capture_output=True, text=True, check=True
    )
    left = Path(done.stdout.strip())
    assert left.is_dir()
    assert not folders.is_owned(left)
    folders.new_folder()
    assert not left.exists()


@pytest.mark.usefixtures("temporary")
def test_a_later_process_of_the_same_number_is_not_the_owner() -> None:
    folder = folders.new_folder()
    own_by(folder, own_identity()._replace(start=f"{os.getpid()}:1"))
    assert not folders.is_owned(folder)
    # Whoever holds the lock lives, whatever the file says.
    assert not folders.is_left_behind(folder)


@pytest.mark.usefixtures("temporary")
@pytest.mark.parametrize("owner", ["", "5", "\xff", "1:1", "[" * 100_000, '{"pid": "x"}'])
def test_a_folder_whose_owner_cannot_be_read_stays(owner: str) -> None:
    folder = folders.new_folder()
    (folder / "owner").write_text(owner, encoding="latin-1")
    assert (folders.is_owned(folder), folders.is_left_behind(folder)) == (False, False)
    assert folders.running_jobs() == []


@pytest.mark.usefixtures("temporary")
def test_a_driver_of_another_container_keeps_its_folder() -> None:
    other = own_identity()._replace(pid=2**22, start=f"{2**22}:1", pid_namespace=7)
    held = folders.new_folder()
    own_by(held, other)
    # It was made here, so this process holds its lock, as the other driver would.
    assert not folders.is_left_behind(held)
    left = held.parent / "left"
    left.mkdir(mode=0o700)
    own_by(left, other)
    assert folders.is_left_behind(left)
    # Of another machine nothing is known, and locks may not reach it.
    own_by(left, other._replace(boot="0", host="elsewhere"))
    assert not folders.is_left_behind(left)


@pytest.mark.usefixtures("temporary")
def test_a_link_in_the_place_of_the_base_is_refused(temporary: Path) -> None:
    home = temporary / "home"
    home.mkdir(mode=0o700)
    (temporary / f"rlinf-{os.getuid()}").symlink_to(home)
    with pytest.raises(ClusterError, match="not a private folder"):
        folders.new_folder()


@pytest.mark.usefixtures("temporary")
def test_a_process_that_waits_to_be_taken_note_of_is_gone() -> None:
    folder = folders.new_folder()
    process = subprocess.Popen(["true"])
    deadline = time.monotonic() + 10
    state = ""
    while state != "Z" and time.monotonic() < deadline:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        state = fields[0]
    own_by(folder, own_identity()._replace(pid=process.pid, start=f"{process.pid}:{fields[19]}"))
    assert not folders.is_owned(folder)
    process.wait()


@pytest.mark.usefixtures("temporary")
def test_a_sweep_ends_the_engines_processes_and_no_others() -> None:
    folder = folders.new_folder()
    other = folders.new_folder()
    sleep = "import time; time.sleep(60)"

    def start(where: Path, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [name, "-c", sleep], executable=sys.executable, env={**os.environ, proc.MARK: str(where)}
        )

    ours, users, others = start(folder, "ray::WorkerProcess"), start(folder, "tensorboard"), start(other, "ray::Worker")
    try:
        proc.reap(str(folder))
        assert ours.wait(timeout=10) == -9
        assert not folder.exists()
        assert users.poll() is None
        assert others.poll() is None
        assert other.is_dir()
    finally:
        for process in (ours, users, others):
            process.kill()
            process.wait()


@pytest.mark.usefixtures("temporary")
def test_a_folder_that_others_may_enter_is_refused(temporary: Path) -> None:
    (temporary / f"rlinf-{os.getuid()}").mkdir(mode=0o755)
    (temporary / f"rlinf-{os.getuid()}").chmod(0o755)
    with pytest.raises(ClusterError, match="not a private folder"):
        folders.new_folder()


@pytest.mark.usefixtures("temporary")
def test_a_guardian_sweeps_when_its_driver_is_killed() -> None:
    driver = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys, time\n"
            "from rlinf_core.process import proc\nfrom rlinf_core.cluster import engine as folders\n"
            "folder = folders.new_folder(); os.environ[proc.MARK] = str(folder)\n"
            "proc.guard(str(folder))\n"
            "subprocess.Popen(['ray::Agent', '-c', 'import time; time.sleep(600)'], executable=sys.executable)\n"
            "print(folder, flush=True); time.sleep(600)",
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tempfile.gettempdir())},
    )
    assert driver.stdout is not None
    folder = Path(driver.stdout.readline().strip())
    until(lambda: len(ray_processes(folder)) == 1, "the process of its Ray", seconds=60)
    driver.kill()
    driver.communicate()
    until(lambda: not folder.exists(), "the end of its folder", seconds=60)
    assert ray_processes(folder) == []


@pytest.mark.usefixtures("temporary")
def test_unmarked_engine_process_is_known_by_its_files(tmp_path: Path) -> None:
    folder = folders.new_folder()
    environment = {name: value for name, value in os.environ.items() if name != proc.MARK}
    command = ["ray::Agent", "-c", "import time; time.sleep(600)"]
    with (folder / "agent.log").open("w") as log, (tmp_path / "other.log").open("w") as other:
        ours, foreign = (
            subprocess.Popen(command, executable=sys.executable, env=environment, stdout=file, stderr=file)
            for file in (log, other)
        )
    try:
        # A program has begun before the kernel shows its arguments.
        until(lambda: proc.command(ours.pid) and proc.command(foreign.pid), "the arguments of both")
        assert ray_processes(folder) == [ours.pid]
        proc.reap(str(folder))
        assert ours.wait(timeout=30) < 0
        assert foreign.poll() is None
    finally:
        for process in (ours, foreign):
            process.kill()
            process.wait()


@pytest.mark.usefixtures("temporary")
def test_file_in_the_place_of_the_base_is_named(temporary: Path) -> None:
    (temporary / f"rlinf-{os.getuid()}").write_text("")
    with pytest.raises(ClusterError, match="cannot be used") as caught:
        folders.new_folder()
    assert (caught.value.why, "TMPDIR" in str(caught.value.help)) == ("File exists", True)


@pytest.mark.usefixtures("temporary")
def test_folder_of_another_user_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = temporary / "rlinf-12345"
    base.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ClusterError, match="not a private folder of yours"):
        folders.new_folder()


@pytest.fixture
def came() -> Iterator[threading.Event]:
    """Set by a SIGTERM."""
    event = threading.Event()
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: event.set())
    yield event
    signal.signal(signal.SIGTERM, earlier)


def reset_in_c() -> None:
    """Have SIGTERM end the process, as Ray's C++ code does, past Python."""
    ctypes.CDLL(None).signal(signal.SIGTERM, signal.SIG_DFL)


def is_default_in_c() -> bool:
    """Return whether SIGTERM would end the process, whatever Python knows of it."""
    with open("/proc/self/status") as file:
        caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))
    return not caught >> (signal.SIGTERM - 1) & 1


def test_a_handler_that_c_code_takes_away_is_back_at_once(came: threading.Event) -> None:
    with kept_handler():
        reset_in_c()
        until(lambda: not is_default_in_c(), "the handler's return")
        signal.raise_signal(signal.SIGTERM)
        assert came.is_set()
        reset_in_c()
    assert not is_default_in_c()


def test_ray_sets_no_handler_of_its_own_while_it_starts(came: threading.Event) -> None:
    import ray._private.utils as utils

    def end(number: int, frame: object) -> None:
        raise SystemExit(number)

    before = utils.set_sigterm_handler
    with own_signals():
        utils.set_sigterm_handler(end)
        signal.raise_signal(signal.SIGTERM)
    assert came.is_set()
    assert utils.set_sigterm_handler is before


def test_a_signal_waits_while_native_code_connects(came: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray._private.worker as worker

    def connect(mode: str, *, node: str) -> str:
        reset_in_c()
        # It comes before any thread could set a handler again.
        signal.raise_signal(signal.SIGTERM)
        assert not came.is_set()
        return f"{mode} {node}"

    monkeypatch.setattr(worker, "connect", connect)
    with own_signals():
        assert worker.connect("driver", node="head") == "driver head"
        assert came.wait(30)
    assert worker.connect is connect


RAISED = """\
The actor died because of an error raised in its creation task, ray::manager.__init__() (pid=17, ip=127.0.0.1)
  File "actor.py", line 32, in __init__
    self._endpoint = Endpoint(ClusterSecret(secret), ip=ip, directory=folder)
rlinf_core.errors.EnvironmentVariableError: environment: `RLINF_NET_IF` is `eth7`, expected an interface
  help: The network interface by which other nodes reach this one.
"""
KILLED = """\
The actor died unexpectedly before finishing this task.
\tclass_name: ManagerProcess
\tpid: 17
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR
"""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            RuntimeError(RAISED),
            "rlinf_core.errors.EnvironmentVariableError: environment: `RLINF_NET_IF` is `eth7`, expected an interface",
        ),
        (
            RuntimeError(KILLED),
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR",
        ),
        (TimeoutError("Get timed out"), "Get timed out"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_its_true_cause_is_below_the_traceback(error: Exception, cause: str) -> None:
    assert cause_of(error) == cause


def test_simultaneous_threads_share_one_manager_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    together = threading.Barrier(2)

    def connect(*_: object) -> object:
        # A second thread, if it is let in, comes before the first one is done.
        with suppress(threading.BrokenBarrierError):
            together.wait(0.2)
        made.append(object())
        return made[-1]

    monkeypatch.setattr(driver_job, "current_client", lambda: made[-1] if made else None)
    monkeypatch.setattr(driver_job, "_connect", connect)
    with ThreadPoolExecutor(2) as pool:
        lines = [
            pool.submit(driver_job.connect_driver, Session("job", b"secret"), "127.0.0.1", "node 0", 0)
            for _ in range(2)
        ]
        assert {id(line.result()) for line in lines} == {id(made[0])}
    assert len(made) == 1
