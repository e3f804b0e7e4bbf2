"""Stacks of a process that runs no its own Python: written by a signal handler in C.

Native code that holds the interpreter's lock keeps every thread of Python from answering. The handler needs no lock,
and no right but that to signal. It writes into a file in memory, which the asking process opens through /proc.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import time
from contextlib import closing
from traceback import FrameSummary
from typing import Final

from rlinf_core.node.process_identity import ProcessIdentity, opened, send
from rlinf_core.node.stacks.stack_text import ThreadStack
from rlinf_core.process.proc import fields, open_files, stat

# Neither a scheduler's warning nor one of the C library's: of the highest real-time signals, which have no meaning.
STACK_SIGNAL: Final = signal.SIGRTMAX - 6
_FILE: Final = "rlinf-stacks"
_PAUSE: Final = 0.005
# The handler writes line by line; after this many pauses without a further one it has ended.
_STILL: Final = 5
_MOST_BYTES: Final = 1 << 20
_THREAD: Final = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*?)\])? .*\(most recent call first\):")
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_ESCAPED: Final = re.compile(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U000[0-9a-f]{5}")


class NoAnswerError(Exception):
    """A process did not write its stacks; the message says why."""


def register() -> None:
    """Have this process write its stacks at `STACK_SIGNAL`. Call in its main thread or before others start."""
    descriptor = os.memfd_create(f"{_FILE}-{os.getpid()}", os.MFD_CLOEXEC)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(STACK_SIGNAL, descriptor, all_threads=True)


def ask(process: ProcessIdentity, seconds: float) -> list[ThreadStack]:
    """Signal a process of this user on this machine, if it has registered; return its threads, as `threads_of` does.

    Raises:
        NoAnswerError: it has not registered, is stopped, or did not write within `seconds`.
        UnprovenProcessError: it cannot be identified with certainty.
        OSError: it has ended, or is another user's.
    """
    deadline = time.monotonic() + seconds
    with opened(process) as handle:
        path = _file_of(process.pid)
        # By default the signal would end it.
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
    """Return the threads of a report of faulthandler: the oldest one first, innermost call last."""
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
    """Return a name of a file or function with the characters that faulthandler writes as escapes, all but ASCII."""
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
    """Return the path of the file that a process writes its stacks to; a forked one may have its parent's too."""
    files = [
        (target.startswith(f"/memfd:{_FILE}-{pid} "), path)
        for path, target in open_files(pid).items()
        if target.startswith(f"/memfd:{_FILE}-")
    ]
    return max(files)[1] if files else None


def _catches(pid: int) -> bool:
    """Return whether a process has a handler of the signal."""
    mask = fields(f"/proc/{pid}/status").get("SigCgt", "0")
    return bool(int(mask, 16) >> (STACK_SIGNAL - 1) & 1)
