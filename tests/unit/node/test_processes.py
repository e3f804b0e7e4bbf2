"""Processes of a machine: how they are forked, told apart, and how they ended."""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import pwd
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.errors import ClusterError, ProcessEnd, RLinfError
from rlinf_core.node import process_life as subject
from rlinf_core.node.cluster_records import folder
from rlinf_core.node.fork_server import ForkClient, ForkSettings
from rlinf_core.node.own_process import name_user, refuse_stripped_docstrings
from rlinf_core.node.process_life import (
    EndWatch,
    Presence,
    ProcessIdentity,
    UnprovenProcessError,
    has_ended,
    held,
    look,
    memory_kill,
    own_group,
    own_identity,
)
from tests.kernel import KEEPS_ENDS

KEPT = pytest.mark.skipif(not KEEPS_ENDS, reason="the kernel does not keep how a process ended")
WAITING = "import sys; sys.stdin.read(); sys.exit(3)"


def waiting() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", WAITING], stdin=subprocess.PIPE)


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL"), (-200, "signal 200")]
)
def test_an_exit_code_is_put_into_words(code: int, words: str) -> None:
    assert ProcessEnd.from_exit_code(code).words.endswith(words)


@KEPT
def test_signal_is_named_once_the_parent_has_collected_it() -> None:
    ends = EndWatch()
    with waiting() as process:
        ends.watch("env:0", process.pid)
        assert ends.end("env:0") is None
        process.kill()
        process.wait()
    end = ends.end("env:0")
    assert end == ProcessEnd("SIGKILL", None, None)
    ends.drop("env:0")
    assert ends.end("env:0") is None


def test_end_is_seen_by_a_descriptor_beyond_1023() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2048), hard), hard))
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    high = fcntl.fcntl(pidfd, fcntl.F_DUPFD, 1500)
    try:
        assert not has_ended(high)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(high)
    finally:
        os.close(pidfd)
        os.close(high)
        process.communicate()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_end_in_words_says_what_is_known() -> None:
    assert ProcessEnd("SIGKILL", None, None).words == "it was killed by SIGKILL"
    assert ProcessEnd(None, 3, None).words == "it ended with exit code 3"
    assert "because memory ran out (Killed" in ProcessEnd("SIGKILL", None, "Killed process 4711").words


@KEPT
def test_exit_code_is_told() -> None:
    ends = EndWatch()
    with waiting() as process:
        ends.watch("env:0", process.pid)
    assert ends.end("env:0") == ProcessEnd(None, 3, None)


def test_process_that_is_gone_is_not_watched() -> None:
    ends = EndWatch()
    with waiting() as process:
        process.send_signal(signal.SIGKILL)
    ends.watch("env:0", process.pid)
    assert not ends.is_watched("env:0")


@pytest.mark.parametrize(
    ("line", "pid", "names"),
    [
        ("Out of memory: Killed process 4711 (python) total-vm:1kB", 4711, True),
        ("Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB", 4711, True),
        ("Out of memory: Killed process 4711 (python) total-vm:1kB", 471, False),
        ("python[4711]: segfault at 0 ip 0", 4711, False),
    ],
)
def test_kill_for_memory_is_one_of_that_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, pid: int, names: bool
) -> None:
    monkeypatch.setattr("rlinf_core.node.process_life.namespace", lambda _: 0xEFFFFFFC)
    log = tmp_path / "kmsg"
    log.write_text(f"4,100,5000000,-;{line}\n")
    assert memory_kill(pid, path=str(log)) == (line if names else None)
    # A line of before its start is about another process with its pid.
    assert memory_kill(pid, since=6.0, path=str(log)) is None


def test_pids_of_another_name_space_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_core.node.process_life.namespace", lambda _: 0)
    log = tmp_path / "kmsg"
    log.write_text("4,100,5000000,-;Out of memory: Killed process 4711 (python)\n")
    assert memory_kill(4711, path=str(log)) is None


class TestControlGroup:
    def test_version_2_counts_its_own_processes(self, tmp_path: Path) -> None:
        group = tmp_path / "fs" / "job"
        group.mkdir(parents=True)
        (tmp_path / "self").write_text("0::/job\n")
        (group / "memory.events").write_text("oom 5\noom_kill 5\n")
        (group / "memory.events.local").write_text("oom 1\noom_kill 2\n")
        (group / "memory.current").write_text("100\n")
        (group / "memory.max").write_text("max\n")
        memory = own_group(tmp_path / "fs", tmp_path / "self")
        assert memory is not None
        assert (memory.kills, memory.used, memory.limit) == (2, 100, None)

    def test_version_1_has_a_folder_of_its_own(self, tmp_path: Path) -> None:
        group = tmp_path / "fs" / "memory" / "job"
        group.mkdir(parents=True)
        (tmp_path / "self").write_text("4:memory:/job\n0::/\n")
        (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
        memory = own_group(tmp_path / "fs", tmp_path / "self")
        assert memory is not None
        assert memory.kills == 4

    def test_group_of_the_whole_machine_counts_for_nobody(self, tmp_path: Path) -> None:
        (tmp_path / "fs" / "memory").mkdir(parents=True)
        (tmp_path / "self").write_text("4:memory:/\n0::/\n")
        assert own_group(tmp_path / "fs", tmp_path / "self") is None


ENTRY = """
import json, os, random, socket, sys
def begin(number, name, *arguments):
    connection = socket.socket(fileno=number)
    said = {"pid": os.getpid(), "parent": os.getppid(), "mark": os.environ.get("MARK"), "name": name,
            "loaded": getattr(sys.modules.get("heavy"), "pid", None), "arguments": arguments,
            "drawn": random.random(), "threads": os.environ.get("OMP_NUM_THREADS")}
    connection.sendall(json.dumps(said).encode() + b"\\n")
    print("a line of", name, flush=True)
    connection.recv(1)
    raise SystemExit(3)
"""


class Host:
    """A folder with modules, and this process in the place of a group's host."""

    def __init__(self, folder: Path, heavy: str = "import os\npid = os.getpid()\n") -> None:
        self.folder = folder
        (folder / "entry.py").write_text(ENTRY)
        (folder / "heavy.py").write_text(heavy)
        path = (str(folder), *sys.path)
        self.client = ForkClient(ForkSettings("entry:begin", ("heavy",), path, str(folder), "01", ("$HOME", 2)))
        self.client.socket.settimeout(60)
        self.connections: dict[str, socket.socket] = {}

    def start(self, name: str) -> dict[str, Any]:
        """Start a process; return what it says."""
        self.connections[name] = self.client.start(name)
        message = self.client.receive()
        said = json.loads(self.connections[name].makefile().readline())
        assert message == {"name": name, "pid": said["pid"]}
        return said

    def close(self) -> None:
        for open_socket in (*self.connections.values(), self.client.socket):
            open_socket.close()


def until_ended(pid: int) -> bool:
    """Return whether a process that is no child of this one ends within a minute."""
    try:
        opened = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([opened], [], [], 60)[0])
    finally:
        os.close(opened)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARK", "$1")
        made = Host(tmp_path)
        yield made
        made.close()


def test_processes_are_forked_from_one_that_has_the_module(host: Host) -> None:
    first, second = host.start("a:0"), host.start("a:1")
    assert first["parent"] == second["parent"] == first["loaded"] == second["loaded"]
    assert first["pid"] != second["pid"]
    assert first["drawn"] != second["drawn"]
    assert (first["mark"], first["name"], first["arguments"]) == ("$1", "a:0", ["$HOME", 2])
    assert first["threads"] == os.environ.get("OMP_NUM_THREADS")


def test_ends_are_reported_with_their_status(host: Host) -> None:
    host.start("a:0")
    killed = host.start("a:1")
    host.connections["a:0"].send(b"x")
    assert host.client.receive() == {"name": "a:0", "end": 3 << 8}
    os.kill(killed["pid"], signal.SIGTERM)
    assert host.client.receive() == {"name": "a:1", "end": signal.SIGTERM}


def test_a_process_is_killed_by_name(host: Host) -> None:
    host.start("a:0")
    host.client.kill("a:9")
    host.client.kill("a:0")
    assert host.client.receive() == {"name": "a:0", "end": signal.SIGKILL}


def test_the_output_goes_where_ray_reads_it(host: Host) -> None:
    pid = host.start("a:0")["pid"]
    host.connections["a:0"].send(b"x")
    host.client.receive()
    (file,) = host.folder.glob(f"worker-*-01-{pid}.out")
    assert file.read_text() == ":actor_name:a:0\na line of a:0\n"


def test_all_end_with_the_host(host: Host) -> None:
    said = host.start("a:0")
    host.client.socket.close()
    assert until_ended(said["pid"])
    assert until_ended(said["parent"])


def test_a_killed_server_is_noticed(host: Host) -> None:
    os.kill(host.start("a:0")["parent"], signal.SIGKILL)
    assert host.client.receive() is None
    with pytest.raises(OSError, match=r".+"):
        host.client.start("a:1")


def test_a_module_that_starts_a_thread_is_left_to_the_processes(tmp_path: Path) -> None:
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    host = Host(tmp_path, heavy=thread)
    said = host.start("a:0")
    assert (said["loaded"], said["name"], said["arguments"]) == (None, "a:0", ["$HOME", 2])
    host.connections["a:0"].send(b"x")
    assert host.client.receive() == {"name": "a:0", "end": 3 << 8}
    host.close()


def test_unimportable_module_is_left_to_the_processes(tmp_path: Path) -> None:
    host = Host(tmp_path, heavy="raise RuntimeError('no such device')\n")
    assert host.start("a:0")["loaded"] is None
    host.close()


def test_a_process_that_cannot_be_forked_is_reported(tmp_path: Path) -> None:
    host = Host(tmp_path, heavy="import os\ndef fork():\n    raise OSError(11, 'no more processes')\nos.fork = fork\n")
    connection = host.client.start("a:0")
    assert host.client.receive() == {"name": "a:0", "end": "[Errno 11] no more processes"}
    connection.close()
    host.close()


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The temporary folder of a process whose user has neither a name nor a variable."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "XDG_STATE_HOME"):
        os.environ.pop(name, None)
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    return short


def test_a_nameless_user_gets_a_home_and_a_name(nameless: Path) -> None:
    with pytest.raises(RuntimeError):
        folder()
    home = name_user()
    assert home is not None
    assert os.environ["HOME"] == home
    assert stat.S_IMODE(os.stat(home).st_mode) == 0o700
    assert folder().is_relative_to(home)
    assert getpass.getuser() == f"uid-{os.getuid()}"
    assert name_user() is None  # it is there now


def test_what_is_set_stays(nameless: Path) -> None:
    os.environ |= {"HOME": "/somewhere", "USER": "sim"}
    assert name_user() is None
    assert (os.environ["HOME"], getpass.getuser()) == ("/somewhere", "sim")


def test_a_home_that_others_may_enter_is_refused(nameless: Path) -> None:
    base = nameless / f"rlinf-{os.getuid()}"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(RLinfError, match="HOME is not set, user"):
        name_user()


LEVELS = {"2": True, "3": True, "9" * 5000: True, "": False, "0": False, "1": False, "yes": False}


@pytest.mark.parametrize(("level", "stripped"), LEVELS.items())
def test_stripped_docstrings_alone_are_refused(level: str, stripped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", level)
    refusal = pytest.raises(ClusterError, match="PYTHONOPTIMIZE") if stripped else nullcontext()
    with refusal as caught:
        refuse_stripped_docstrings()
    assert caught is None or caught.value.help == "unset PYTHONOPTIMIZE"


OTHER_BOOT = "11111111-2222-3333-4444-555555555555"
_HOLD = "import os, sys; os.open(sys.argv[1], os.O_RDONLY); print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has `tmp_path` open, as the driver of a run has its folder."""
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def of(pid: int) -> ProcessIdentity:
    return own_identity()._replace(pid=pid, start=subject.identity(pid) or f"{pid}:0")


def test_this_process_is_alive() -> None:
    own = own_identity()
    assert own.pid == os.getpid()
    assert all((own.start, own.host, own.boot, own.pid_namespace))
    assert look(own) is Presence.ALIVE


@pytest.mark.parametrize(
    "fields",
    [
        {"pid": -1, "start": ""},
        {"pid": 0, "start": ""},
        {"pid": 0, "start": "0:1"},
        {"start": ""},
        {"start": "None"},
        {"start": "1:1"},
        {"host": "elsewhere", "boot": OTHER_BOOT},
        {"host": "elsewhere", "boot": "", "pid_namespace": 0},
        {"boot": OTHER_BOOT},
        {"pid_namespace": 12345},
        {"pid_namespace": 12345, "start": f"{os.getpid()}:1"},
    ],
)
def test_what_is_absent_or_elsewhere_cannot_be_told(fields: dict[str, object]) -> None:
    assert look(own_identity()._replace(**fields)) is Presence.UNKNOWN  # pyright: ignore[reportArgumentType]


def test_a_later_process_of_the_same_pid_is_another_one() -> None:
    assert look(own_identity()._replace(start=f"{os.getpid()}:1")) is Presence.GONE
    assert look(own_identity()._replace(pid=2**22, start=f"{2**22}:1")) is Presence.GONE


def test_an_earlier_rlinf_wrote_pid_start_and_host_alone() -> None:
    old = own_identity()._replace(boot="", pid_namespace=0, machine="")
    assert look(old) is Presence.ALIVE
    # It may be in another container of this host's name.
    assert look(old._replace(start=f"{old.pid}:1")) is Presence.UNKNOWN


class TestAnEarlierBoot:
    @pytest.fixture(autouse=True)
    def _machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subject, "machine_id", lambda: "abc")
        monkeypatch.setattr(subject, "_booted", lambda: 1000.0)

    def test_its_processes_ended_with_it(self) -> None:
        assert look(own_identity()._replace(boot=OTHER_BOOT), written=999.0) is Presence.GONE

    @pytest.mark.parametrize("fields", [{"machine": ""}, {"machine": "def"}, {"host": "other"}, {"pid_namespace": 7}])
    def test_another_machine_is_none(self, fields: dict[str, object]) -> None:
        other = own_identity()._replace(boot=OTHER_BOOT, **fields)  # pyright: ignore[reportArgumentType]
        assert look(other, written=999.0) is Presence.UNKNOWN

    @pytest.mark.parametrize("written", [0.0, 1000.0, 2000.0])
    def test_one_that_wrote_after_this_start_is_another_machine(self, written: float) -> None:
        assert look(own_identity()._replace(boot=OTHER_BOOT), written=written) is Presence.UNKNOWN

    def test_an_installation_without_an_id_is_never_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subject, "machine_id", lambda: "")
        assert look(own_identity()._replace(boot=OTHER_BOOT), written=999.0) is Presence.UNKNOWN


def test_proc_of_another_name_space_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_identity()
    monkeypatch.setattr(subject.os, "readlink", lambda path: "99999")
    assert look(own) is Presence.UNKNOWN
    assert own_identity().start == ""


class TestHeld:
    def test_the_process_that_has_the_folder_open(self, child: subprocess.Popen[str], tmp_path: Path) -> None:
        with held(of(child.pid), tmp_path) as handle:
            subject.send(handle, signal.SIGTERM)
        assert child.wait(timeout=30) == -signal.SIGTERM

    def test_any_other_process_is_refused(self, child: subprocess.Popen[str], tmp_path: Path) -> None:
        (tmp_path / "copy").mkdir()
        with (
            pytest.raises(UnprovenProcessError, match="does not have the folder open"),
            held(of(child.pid), tmp_path / "copy"),
        ):
            pass
        assert child.poll() is None

    @pytest.mark.parametrize("pid", [-1, 0, 1])
    def test_low_numbers_are_never_held(self, pid: int, tmp_path: Path) -> None:
        with pytest.raises(UnprovenProcessError, match="never signalled"), held(of(1)._replace(pid=pid), tmp_path):
            pass

    def test_a_later_process_of_the_pid_is_refused(self, child: subprocess.Popen[str], tmp_path: Path) -> None:
        with pytest.raises(ProcessLookupError), held(of(child.pid)._replace(start=f"{child.pid}:1"), tmp_path):
            pass

    def test_an_identity_of_an_earlier_rlinf_is_refused(self, child: subprocess.Popen[str], tmp_path: Path) -> None:
        old = of(child.pid)._replace(boot="", pid_namespace=0)
        with pytest.raises(UnprovenProcessError, match="earlier rlinf"), held(old, tmp_path):
            pass
