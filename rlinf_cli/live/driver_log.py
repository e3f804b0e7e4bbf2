"""The log of a run's driver: a file in the run folder; warnings and errors also on the screen."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

from rlinf_cli.console import console
from rlinf_core import env_vars
from rlinf_core.foreign.files import open_log
from rlinf_core.process.known_secrets import hiding_formatter

LOGGER = logging.getLogger("rlinf")
# Its component name in the run folder.
DRIVER = "driver"
# Likewise for the output of a detached run and its workers.
PRINTED = "output"


def open_log_of(file: Path) -> int:
    """Open a log of a run, `RUN/logs/COMPONENT/rank_N.log`, for appending; create it with its folders.

    Raises:
        OSError: it cannot be opened, or is a link.
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
