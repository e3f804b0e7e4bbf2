"""A process that goes on when the command that started it has returned, and its terminal is closed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

# What the child calls once it is on its own: what it tells its parent, and the file that its output goes to.
Settle: TypeAlias = Callable[[Any, Path], None]


def start(work: Callable[[Settle], int]) -> tuple[Any, int]:
    """Run `work` in a child of a session of its own. Nothing of this process may run on threads yet.

    Until the child settles it shares this process's output, so what keeps it from starting is said where it is read.

    Args:
        work: what the child does; it returns its exit code.

    Returns:
        In the parent: what the child told, and 0; or None and the exit code of a child that ended before.
    """
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        # Otherwise what is still buffered would be printed by both.
        stream.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _end(_run(work, writing))
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        try:
            text = pipe.read()
        except (KeyboardInterrupt, SystemExit) as end:
            # The child is no longer in this terminal's session. What it says as it ends is still read here.
            os.kill(child, signal.SIGINT if isinstance(end, KeyboardInterrupt) else signal.SIGTERM)
            os.waitpid(child, 0)
            raise
    if text:
        return json.loads(text), 0
    _, status = os.waitpid(child, 0)
    return None, os.waitstatus_to_exitcode(status)


def _run(work: Callable[[Settle], int], writing: int) -> int:
    os.setsid()

    def settle(told: Any, output: Path) -> None:
        _redirect(output)
        os.write(writing, json.dumps(told).encode())
        os.close(writing)

    return work(settle)


def _redirect(output: Path) -> None:
    """Send standard output and error to a file, and leave nothing to be read."""
    from rlinf_cli.live.driver_log import open_log_of

    nothing = os.open(os.devnull, os.O_RDONLY)
    file = open_log_of(output)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(nothing, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for descriptor in (nothing, file):
        os.close(descriptor)


def _end(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
