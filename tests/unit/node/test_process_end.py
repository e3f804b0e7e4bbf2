"""How a process ended, from a descriptor that somebody else than its parent holds."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_core.errors import ProcessEnd
from rlinf_core.node.process_end import EndWatch, has_ended, memory_kill, own_group
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
    monkeypatch.setattr("rlinf_core.node.process_end.namespace", lambda _: 0xEFFFFFFC)
    log = tmp_path / "kmsg"
    log.write_text(f"4,100,5000000,-;{line}\n")
    assert memory_kill(pid, path=str(log)) == (line if names else None)
    # A line of before its start is about another process with its pid.
    assert memory_kill(pid, since=6.0, path=str(log)) is None


def test_pids_of_another_name_space_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_core.node.process_end.namespace", lambda _: 0)
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
