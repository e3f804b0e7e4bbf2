"""Stacks of processes that run no Python of their own, those that they started, and what is never signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlinf_core.node import stacks
from rlinf_core.node.process_life import ProcessIdentity, UnprovenProcessError, identity_here, own_identity
from rlinf_core.node.stacks import (
    NoAnswerError,
    StackRequest,
    ask,
    children_of,
    read_stacks,
    spell,
    threads_of,
    threads_of_spy,
)
from tests.waiting import until

HOLDS = """
import ctypes
from rlinf_core.node import stacks
stacks.register()
library = ctypes.PyDLL(None)
lock = ctypes.create_string_buffer(128)
def hold_the_lock():
    library.pthread_mutex_lock(lock)
    print("ready", flush=True)
    library.pthread_mutex_lock(lock)
hold_the_lock()
"""
# Each request finds a cycle to collect, whose destructor lets other threads run: they ask, too, or start threads.
ASKS_WHILE_IT_COLLECTS = """
import gc, threading, time
from rlinf_core.node.stacks import describe_stacks
class Cycle:
    def __init__(self):
        self.own = self
    def __del__(self):
        time.sleep(0.001)
right = []
def ask():
    for _ in range(300):
        Cycle()
        own = f"thread {threading.current_thread().name}:"
        right.append(own in describe_stacks().splitlines())
gc.set_threshold(1)
threads = [threading.Thread(target=ask) for _ in range(3)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    short = threading.Thread(target=int)
    short.start()
    short.join()
print(len(right), all(right), gc.isenabled())
"""
SLEEPS = "import sys; print('ready', flush=True); sys.stdin.read()"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {HOLDS!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
"""
Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        for child, _ in children_of(process.pid):
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def _without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "py_spy", lambda: None)


def test_process_that_holds_the_lock_writes_its_stack(start: Start) -> None:
    process = identity_here(start(HOLDS).pid)
    # It says so just before it takes the lock.
    until(lambda: 'File "<string>", line 10, in hold_the_lock' in spell(ask(process, 20)))
    assert spell(ask(process, 20)).count("in hold_the_lock") == 1


def test_process_without_a_handler_is_not_signalled(start: Start) -> None:
    sleeping = start(SLEEPS)
    with pytest.raises(NoAnswerError, match="no handler"):
        ask(identity_here(sleeping.pid), 20)
    assert sleeping.poll() is None


@pytest.mark.parametrize(
    "change", [{"start": "{pid}:1"}, {"boot": "11111111-2222-3333-4444-555555555555"}, {"pid_namespace": 12345}]
)
def test_stale_identity_is_not_signalled(start: Start, change: dict[str, str | int]) -> None:
    holding = start(HOLDS)
    fields = {
        name: value.format(pid=holding.pid) if isinstance(value, str) else value for name, value in change.items()
    }
    stale: ProcessIdentity = identity_here(holding.pid)._replace(**fields)  # pyright: ignore[reportArgumentType]
    with pytest.raises((UnprovenProcessError, ProcessLookupError)):
        ask(stale, 20)
    report = Path(f"/proc/{holding.pid}/fd")
    sizes = [os.stat(file).st_size for file in report.iterdir() if "rlinf-stacks" in os.readlink(file)]
    assert sizes == [0]


def test_stopped_process_is_named(start: Start) -> None:
    holding = start(HOLDS)
    holding.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holding.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(NoAnswerError, match=f"kill -CONT {holding.pid}"):
        ask(identity_here(holding.pid), 20)


def test_hung_child_is_read_with_its_parent(start: Start) -> None:
    parent = start(PARENT)
    own, child = read_stacks(StackRequest(identity_here(parent.pid), own=True, native=False), 20)
    assert (own.pid, own.parent, own.stacks) == (parent.pid, 0, "")
    assert "no handler" in own.reason
    assert "py-spy is not installed" in own.reason
    assert (child.parent, child.source) == (parent.pid, "signal")
    assert "in hold_the_lock" in child.stacks
    assert child.reason == ""


def test_child_that_is_asked_for_itself_is_left_out(start: Start) -> None:
    parent = start(PARENT)
    ((child, _),) = children_of(parent.pid)
    assert list(children_of(parent.pid, {child})) == []


def test_program_that_is_not_python_is_named() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as program:
        read = read_stacks(StackRequest(own_identity(), own=False, native=False), 20)
        assert [(one.command, one.reason) for one in read if one.pid == program.pid] == [("cat", stacks.NOT_PYTHON)]


def test_end_of_the_process_is_told() -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        ended = identity_here(process.pid)
        process.kill()
    with pytest.raises(ProcessLookupError):
        read_stacks(StackRequest(ended, own=True, native=False))


def test_report_of_faulthandler_is_read() -> None:
    report = (
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "/lib/threading.py", line 327 in wait\n'
        "\n"
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "a.py", line 2 in inner\n'
        '  File "a b.py", line 9 in <module>\n'
    )
    main, other = threads_of(report)
    assert [(frame.filename, frame.lineno, frame.name) for frame in main.frames] == [
        ("a b.py", 9, "<module>"),
        ("a.py", 2, "inner"),
    ]
    assert (main.name, main.is_runtime) == ("0x00007f02", False)
    assert other.is_runtime


def test_report_of_py_spy_is_read() -> None:
    native = {"name": "mm_kernel", "filename": "libtorch.so", "line": 0}
    python = {"name": "learn", "filename": "/x/actor.py", "line": 3}
    report = [
        {"thread_name": "other", "os_thread_id": 2, "thread_id": 3, "owns_gil": False, "frames": [python]},
        {"thread_name": "MainThread", "os_thread_id": 1, "thread_id": 4, "owns_gil": True, "frames": [native, python]},
    ]
    main, _ = threads_of_spy(report)
    assert main.name == "MainThread, holds the interpreter's lock"
    assert main.text == '  File "/x/actor.py", line 3, in learn\n  File "libtorch.so", in mm_kernel'


@pytest.mark.parametrize("report", [[{}], {"error": 1}, 7, [None]])
def test_other_report_of_py_spy_is_refused(report: object) -> None:
    with pytest.raises(ValueError, match="py-spy's report cannot be read"):
        threads_of_spy(report)


def test_signal_is_no_warning_of_a_scheduler() -> None:
    assert signal.SIGRTMIN < stacks.STACK_SIGNAL < signal.SIGRTMAX


def test_names_beyond_ascii_are_those_of_the_file() -> None:
    report = (
        "Current thread 0x00007f01 (most recent call first):\n"
        '  File "/home/\\xdcbung 1 \\u2013 \\u30e2\\U0001f916/cart.py", line 3 in gr\\xfc\\xdfen\n'
    )
    [thread] = threads_of(report)
    [frame] = thread.frames
    assert (frame.filename, frame.name) == ("/home/Übung 1 – モ🤖/cart.py", "grüßen")


def test_own_stacks_are_read_while_others_collect() -> None:
    """Without care, all threads of such a process wait for ever, most often within a second."""
    asked = subprocess.run(
        [sys.executable, "-c", ASKS_WHILE_IT_COLLECTS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (asked.stdout, asked.stderr) == ("900 True True\n", "")
