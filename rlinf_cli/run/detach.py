"""Detached processes, which outlive their command and its terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

# Called by the child when it is ready, with its message to the parent and its output file.
Settle: TypeAlias = Callable[[Any, Path], None]


def start(work: Callable[[Settle], int]) -> tuple[Any, int]:
    """Run `work` in a child process with its own session. This process must not have started threads.

    Until the child settles it shares this process's output, so startup errors are visible.

    Args:
        work: the child's function; it returns the exit code.

    Returns:
        In the parent: the child's message and 0; or None and the exit code of a child that ended before.
    """
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        # Otherwise both would print the buffered output.
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
            # The child has left this terminal's session, but its last output is still read here.
            os.kill(child, signal.SIGINT if isinstance(end, KeyboardInterrupt) else signal.SIGTERM)
            os.waitpid(child, 0)
            raise
    if text:
        return json.loads(text), 0
    _, status = os.waitpid(child, 0)
    return None, os.waitstatus_to_exitcode(status)


def _run(work: Callable[[Settle], int], writing: int) -> int:
    os.setsid()

    def settle(message: Any, output: Path) -> None:
        _redirect(output)
        os.write(writing, json.dumps(message).encode())
        os.close(writing)

    return work(settle)


def _redirect(output: Path) -> None:
    """Redirect standard output and error to a file, and standard input from /dev/null."""
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
