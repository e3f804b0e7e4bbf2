"""The log file of a run's driver in the run folder, and detached drivers, which continue without their terminal."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeAlias

from rlinf_cli import console
from rlinf_core import env_vars
from rlinf_core.foreign.files import open_log
from rlinf_core.process.known_secrets import hiding_formatter

LOGGER = logging.getLogger("rlinf")
# The driver's component name in the run folder.
DRIVER = "driver"
# The component name for the output of a detached run and its workers.
PRINTED = "output"


def open_log_of(file: Path) -> int:
    """Open a log of a run, `RUN/logs/COMPONENT/rank_N.log`, for appending; create it with its folders.

    Raises:
        OSError: the file cannot be opened, or is a link.
    """
    run = file.parents[2]
    return open_log(run, str(file.relative_to(run)))


class _Screen(logging.Handler):
    """A log handler that writes to the console."""

    def emit(self, record: logging.LogRecord) -> None:
        style = "red" if record.levelno >= logging.ERROR else "yellow"
        console.message(f"{console.style(record.levelname.lower(), style)}: {record.getMessage()}")


class _LogFileHandler(logging.FileHandler):
    """A log handler for the file. A write error is reported once; logging would print a traceback for every line."""

    _reported = False

    def _open(self) -> TextIOWrapper:
        return os.fdopen(open_log_of(Path(self.baseFilename)), "a", encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not self._reported:
            self._reported = True
            console.error(f"{self.baseFilename} can no longer be written: {sys.exc_info()[1]}")


@contextmanager
def driver_log(file: Path, *, on_screen: bool) -> Generator[logging.Logger, None, None]:
    """Log this process's records to `file` within the block, in the workers' format.

    Args:
        on_screen: whether warnings and errors are also printed.
    """
    os.close(open_log_of(file))
    writer = _LogFileHandler(file, encoding="utf-8")
    writer.setFormatter(hiding_formatter(f"%(asctime)s %(levelname)s [{DRIVER}] %(message)s"))
    handlers: list[logging.Handler] = [writer]
    if on_screen:
        screen = _Screen(logging.WARNING)
        handlers.append(screen)
    earlier = LOGGER.handlers[:], LOGGER.level, LOGGER.propagate
    LOGGER.handlers[:] = handlers
    LOGGER.setLevel(env_vars.LOG_LEVEL.get())
    LOGGER.propagate = False
    try:
        yield LOGGER
    finally:
        LOGGER.handlers[:], LOGGER.level, LOGGER.propagate = earlier
        writer.close()


# Called by the child when it is ready, with its message to the parent and its output file.
Settle: TypeAlias = Callable[[Any, Path], None]


def detached(work: Callable[[Settle], int]) -> tuple[Any, int]:
    """Run `work` in a child process with its own session. This process must not have started threads.

    Until the child settles, it shares this process's output, so startup errors are visible.

    Args:
        work: the child's function; it returns the exit code.

    Returns:
        In the parent: the child's message and 0; or None and the exit code of a child that ended before settling.
    """
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        # Otherwise both processes would print the buffered output.
        stream.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _exit(_settled(work, writing))
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


def _settled(work: Callable[[Settle], int], writing: int) -> int:
    os.setsid()

    def settle(message: Any, output: Path) -> None:
        _redirect(output)
        os.write(writing, json.dumps(message).encode())
        os.close(writing)

    return work(settle)


def _redirect(output: Path) -> None:
    """Redirect standard output and error to a file, and standard input from /dev/null."""

    nothing = os.open(os.devnull, os.O_RDONLY)
    file = open_log_of(output)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(nothing, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for descriptor in (nothing, file):
        os.close(descriptor)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
