"""Stacks of other processes of this machine, including unresponsive ones, and of the processes that they started.

py-spy reads them from outside, with native frames, but may need privileges; without it, a signal handler writes them.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from traceback import FrameSummary, format_list
from types import FrameType
from typing import Any, Final, NamedTuple, cast

from rlinf_core.node.process_life import (
    ProcessIdentity,
    UnprovenProcessError,
    has_ended,
    identity_here,
    opened,
    send,
)
from rlinf_core.process.proc import command, fields, open_files, pids, spell_command, stat
from rlinf_core.process.requirements import install_command

# Stacks of a process whose Python code cannot run: a signal handler in C writes them.
#
# Native code that holds the interpreter's lock blocks every Python thread. The handler needs no lock, and the asking
# process needs no privilege except to signal. It writes into a file in memory, which is opened through /proc.


# A high real-time signal, which neither schedulers nor the C library use.
STACK_SIGNAL: Final = signal.SIGRTMAX - 6
_FILE: Final = "rlinf-stacks"
_PAUSE: Final = 0.005
# The handler writes line by line; after this many pauses without a further line it counts as finished.
_STILL: Final = 5
_MOST_BYTES: Final = 1 << 20
_THREAD: Final = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*?)\])? .*\(most recent call first\):")
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_ESCAPED: Final = re.compile(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U000[0-9a-f]{5}")


class NoAnswerError(Exception):
    """An error for a process that did not write its stacks; the message says why."""


def register() -> None:
    """Make this process write its stacks on `STACK_SIGNAL`. Call in its main thread or before others start."""
    descriptor = os.memfd_create(f"{_FILE}-{os.getpid()}", os.MFD_CLOEXEC)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(STACK_SIGNAL, descriptor, all_threads=True)


def ask(process: ProcessIdentity, seconds: float) -> list[ThreadStack]:
    """Signal a process of this user on this machine that has called `register`; return its threads.

    Raises:
        NoAnswerError: the process has not registered, is stopped, or did not write within `seconds`.
        UnprovenProcessError: the process cannot be identified with certainty.
        OSError: the process has ended, or belongs to another user.
    """
    deadline = time.monotonic() + seconds
    with opened(process) as handle:
        path = _file_of(process.pid)
        # Without a handler the signal would end the process.
        if path is None or not _catches(process.pid):
            raise NoAnswerError("it has no handler that writes its stacks")
        if stat(process.pid).is_stopped:
            raise NoAnswerError(f"it is stopped, as by SIGSTOP; `kill -CONT {process.pid}` continues it")
        with closing(os.fdopen(os.open(path, os.O_RDWR | os.O_CLOEXEC), "rb")) as file:
            _lock(file.fileno(), deadline)
            os.ftruncate(file.fileno(), 0)
            send(handle, STACK_SIGNAL)
            return threads_of(_written(file.fileno(), process.pid, deadline))


def threads_of(report: str) -> list[ThreadStack]:
    """Return the threads in a report of faulthandler: the oldest first, each with the innermost call last."""
    threads: list[tuple[str, list[FrameSummary]]] = []
    for line in report.splitlines():
        thread, frame = _THREAD.match(line), _FRAME.match(line)
        if thread:
            threads.append((thread[2] or thread[1], []))
        elif frame and threads:
            number = int(frame[2]) if frame[2].isdigit() else None
            threads[-1][1].insert(0, FrameSummary(_decoded(frame[1]), number, _decoded(frame[3])))
    return [ThreadStack(name, frames) for name, frames in reversed(threads)]


def _decoded(name: str) -> str:
    """Return the name of a file or function, decoded: faulthandler writes characters that are not ASCII as escapes."""
    return _ESCAPED.sub(lambda escape: chr(int(escape[0][2:], 16)), name)


def _lock(file: int, deadline: float) -> None:
    """Wait for the lock that admits one request at a time."""
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise NoAnswerError("another command asks it for its stacks") from None
            time.sleep(_PAUSE)


def _written(file: int, pid: int, deadline: float) -> str:
    size, still = 0, 0
    while still < _STILL or not size:
        if time.monotonic() >= deadline:
            if size:
                break
            where = ", blocked in the kernel" if stat(pid).state == "D" else ""
            raise NoAnswerError(f"it did not take a signal in time{where}")
        time.sleep(_PAUSE)
        now = os.fstat(file).st_size
        size, still = now, still + 1 if now == size else 0
    return os.pread(file, _MOST_BYTES, 0).decode(errors="replace")


def _file_of(pid: int) -> str | None:
    """Return the path of the file that a process writes its stacks to, or None; a forked one may use its parent's."""
    files = [
        (target.startswith(f"/memfd:{_FILE}-{pid} "), path)
        for path, target in open_files(pid).items()
        if target.startswith(f"/memfd:{_FILE}-")
    ]
    return max(files)[1] if files else None


def _catches(pid: int) -> bool:
    """Return whether a process has a handler for `STACK_SIGNAL`."""
    mask = fields(f"/proc/{pid}/status").get("SigCgt", "0")
    return bool(int(mask, 16) >> (STACK_SIGNAL - 1) & 1)


# The text of stacks, the same for both ways of reading them.


# The path of Ray's frames, which are irrelevant for user code.
_ENGINE: Final = "/site-packages/ray/"
# Paths of the runtime: a thread with no other frames waits for work.
_RUNTIME: Final = (
    _ENGINE,
    "/rlinf_core/",
    "/threading.py",
    "/selectors.py",
    "/asyncio/",
    "/concurrent/futures/",
    "/socket.py",
)
_NATIVE_LINE: Final = 0


class ThreadStack(NamedTuple):
    """The stack of one thread, innermost call last."""

    name: str
    frames: Sequence[FrameSummary]

    @property
    def text(self) -> str:
        """The calls with their lines, as in a traceback, without those of Ray; empty if there are no others."""
        return "".join(_line(frame) for frame in self.frames if _ENGINE not in frame.filename).rstrip()

    @property
    def is_runtime(self) -> bool:
        """Whether no frame is in user code."""
        return all(any(part in frame.filename for part in _RUNTIME) for frame in self.frames)


def spell(threads: Iterable[ThreadStack]) -> str:
    """Return the stacks of threads as text, one paragraph each."""
    return "\n".join(f"thread {thread.name}:\n{thread.text}" for thread in threads if thread.text)


def of_interest(threads: Sequence[ThreadStack]) -> list[ThreadStack]:
    """Return the threads that run user code; all of them if none does."""
    return [thread for thread in threads if not thread.is_runtime] or list(threads)


def threads_of_spy(report: Any) -> list[ThreadStack]:
    """Return the threads in a report of `py-spy dump --json`, the main thread first.

    Raises:
        ValueError: it is not such a report.
    """
    try:
        threads = [_spied(thread) for thread in cast("list[Mapping[str, Any]]", report)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"py-spy's report cannot be read: {type(error).__name__}: {error}") from None
    return sorted(threads, key=lambda thread: thread.name.split(",")[0] != "MainThread")


def _spied(thread: Mapping[str, Any]) -> ThreadStack:
    name = str(thread["thread_name"] or thread["os_thread_id"] or thread["thread_id"])
    frames = [
        FrameSummary(str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in thread["frames"]
    ]
    return ThreadStack(f"{name}, holds the interpreter's lock" if thread["owns_gil"] else name, frames[::-1])


def _line(frame: FrameSummary) -> str:
    if frame.lineno in (None, _NATIVE_LINE):
        return f'  File "{frame.filename}", in {frame.name}\n'
    return "".join(format_list([frame]))


# Prefixes of the names of runtime threads, which are irrelevant for user code.
_RUNTIME_THREADS = ("rlinf-", "ray_", "GCCollect", "PythonGCThread")


def describe_stacks() -> str:
    """Return the stacks of this process as text: the main thread first, each with the innermost call last."""
    frames = _current_frames()
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: (thread is not main, thread.name))
    stacks: list[ThreadStack] = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is None or (thread.name.startswith(_RUNTIME_THREADS) and thread.name != "rlinf-async-methods"):
            continue
        stacks.append(ThreadStack(thread.name, traceback.extract_stack(frame)))
    return spell(stacks)


def _current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by its id.

    CPython holds a lock of its own meanwhile. A collection that began then could run a destructor that releases the
    interpreter's lock; a thread that starts or asks the same would keep that one, and wait for the other for ever.
    """
    with _COLLECTING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, in spite of its name
        finally:
            if collects:
                gc.enable()


# Held while collections are off, so that two threads do not turn them off and on in the wrong order.
_COLLECTING: Final = threading.Lock()

# The time limit for one process.
SECONDS: Final = 2.0
_AT_ONCE: Final = 8
NOT_PYTHON: Final = "it does not run Python"
_MOST_CHILDREN: Final = 256
_MOST_COMMAND: Final = 120
# The prefixes of the lines in which py-spy prints why it failed.
_REASON: Final = ("Error: ", "Reason: ")
_RAY_TITLE: Final = b"ray::"


class ProcessStacks(NamedTuple):
    """The stacks of one process, or why there are none.

    Attributes:
        parent: the pid of its parent; 0 for the process of the request.
        command: its command line, shortened.
        source: `py-spy`, `signal`, or empty without stacks.
        reason: why there are no stacks, or no native ones; else empty.
    """

    pid: int
    parent: int
    command: str
    source: str
    stacks: str
    reason: str


def install_spy() -> str:
    """Return the command that installs py-spy for this interpreter."""
    return install_command("py_spy")


class StackRequest(NamedTuple):
    """A request for stacks.

    Attributes:
        process: the process; the stacks of the processes that it started are always wanted.
        own: whether its own stacks are wanted, too.
        native: whether native frames are wanted.
        others: pids to leave out, which have requests of their own.
    """

    process: ProcessIdentity
    own: bool
    native: bool
    others: tuple[int, ...] = ()


def py_spy() -> str | None:
    """Return the path of py-spy beside this interpreter or in PATH; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def read_stacks(request: StackRequest, seconds: float = SECONDS) -> list[ProcessStacks]:
    """Return the stacks of a process of this machine and of the processes that it started, read in parallel.

    Raises:
        UnprovenProcessError: the process cannot be identified with certainty.
        OSError: the process has ended.
    """
    with opened(request.process):
        wanted = [(request.process, 0)] if request.own else []
        for pid, parent in children_of(request.process.pid, request.others):
            try:
                wanted.append((identity_here(pid), parent))
            except ProcessLookupError:
                continue
            if stat(pid).parent != parent:
                wanted.pop()  # it has ended, and another process has its pid
    if not wanted:
        return []
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="rlinf-stacks") as pool:
        reading = [pool.submit(_read, process, parent, request.native, seconds) for process, parent in wanted]
        return [read.result() for read in reading]


def children_of(pid: int, others: Collection[int] = ()) -> Iterator[tuple[int, int]]:
    """Yield the pids of the living descendants of a process, each with its parent's pid.

    `others` and processes of Ray are left out, with their descendants.
    """
    by_parent: dict[int, list[int]] = {}
    for one in pids():
        by_parent.setdefault(stat(one).parent, []).append(one)
    level, count = [pid], 0
    while level:
        parent = level.pop(0)
        for child in sorted(by_parent.get(parent, ())):
            if (
                child in others
                or child == os.getpid()
                or command(child).startswith(_RAY_TITLE)
                or count >= _MOST_CHILDREN
            ):
                continue
            count += 1
            level.append(child)
            yield child, parent


def _read(process: ProcessIdentity, parent: int, native: bool, seconds: float) -> ProcessStacks:
    deadline = time.monotonic() + seconds
    shown = spell_command(process.pid)[:_MOST_COMMAND]
    reasons: list[str] = []
    for source, read in (("py-spy", partial(_by_spy, native=native)), ("signal", ask)):
        try:
            threads = read(process, seconds=max(0.1, deadline - time.monotonic()))
        except ProcessLookupError:
            return ProcessStacks(process.pid, parent, shown, "", "", "it has ended")
        except (NoAnswerError, UnprovenProcessError, ValueError) as error:
            reasons.append(str(error))
        except OSError as error:
            reasons.append(f"{source}: {error.strerror or error}")
        else:
            missing = "; ".join(reasons) if native and source != "py-spy" else ""
            text = spell(threads if native else of_interest(threads))
            return ProcessStacks(process.pid, parent, shown, source, text, missing)
    if not _is_python(process.pid):
        reasons = [NOT_PYTHON]
    return ProcessStacks(process.pid, parent, shown, "", "", "; ".join(reasons))


def _by_spy(process: ProcessIdentity, native: bool, seconds: float) -> list[ThreadStack]:
    """Read the stacks of a process with py-spy.

    Raises: as `ask`; `ValueError` if py-spy prints no report.
    """
    program = py_spy()
    if program is None:
        raise NoAnswerError(f"py-spy is not installed: `{install_spy()}`")
    words = [program, "dump", "--json", "--pid", str(process.pid), *(["--native"] if native else [])]
    with opened(process) as handle:
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise NoAnswerError(f"py-spy did not end within {seconds:.1f} s") from None
        if has_ended(handle):
            raise ProcessLookupError
    if done.returncode != 0:
        raise NoAnswerError(f"py-spy: {_why(done.stderr)}")
    return threads_of_spy(json.loads(done.stdout))


def _why(printed: str) -> str:
    """Return the innermost reason in the error output of py-spy."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    named = [line.partition(": ")[2] for line in lines if line.startswith(_REASON)]
    return (named or lines or ["it failed without a word"])[-1]


def _is_python(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return any("python" in line.rpartition("/")[2] for line in file)
    except OSError:
        return True
