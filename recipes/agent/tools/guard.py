"""Runs a command, and kills it with all its descendants when a requesting process exits.

    python -I -S guard.py PID COMMAND...

PID is the requesting process. The command inherits standard input, and its output is passed on; a line of more than
`LONGEST_LINE` bytes ends the command, as readers hold whole lines in memory. Uses the standard library only. Works on
Linux; on other systems it only runs the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from types import FrameType

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_NOT_FOUND = 127
LONGEST_LINE = 16 << 20


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    asked_by, command = int(arguments[0]), arguments[1:]
    signal.signal(signal.SIGTERM, _leave)
    # Orphaned descendants become children of this process, however they were started.
    _prctl(_SET_CHILD_SUBREAPER, 1)
    _prctl(_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != asked_by:
        return 1  # the requesting process exited before it could be watched
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=_dies_with_parent)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND
    relay = threading.Thread(target=_pass_on, args=(process,), daemon=True)
    relay.start()
    try:
        return process.wait()
    finally:
        end_children()
        relay.join()


def _pass_on(process: subprocess.Popen[bytes]) -> None:
    """Pass on a process's output, and kill it if nobody reads or a line is too long."""
    source, length = process.stdout.fileno(), 0  # pyright: ignore[reportOptionalMemberAccess]
    try:
        while part := os.read(source, 1 << 16):
            length = len(part) - part.rfind(b"\n") - 1 if b"\n" in part else length + len(part)
            if length > LONGEST_LINE:
                print(f"a line of more than {LONGEST_LINE} bytes ends the command", file=sys.stderr)
                process.kill()
                return
            while part:
                part = part[os.write(1, part) :]
    except OSError:
        process.kill()  # the requesting process has exited


def end_children() -> None:
    """Kill all descendants, until none is left."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _children() -> list[int]:
    try:
        with open("/proc/thread-self/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _dies_with_parent() -> None:
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
