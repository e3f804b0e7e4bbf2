"""Logs of workers: lines with the worker's address go to the output of the process and to the worker's log file.

The file, on the worker's node, also contains the output of the worker's code, with known secret values masked.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from rlinf_core import env_vars
from rlinf_core.config.secrets import environment_secrets
from rlinf_core.context import WorkerContext
from rlinf_core.foreign.files import open_log
from rlinf_core.process.known_secrets import hidden, hiding_formatter, remember

LOGGER = logging.getLogger("rlinf")


def set_up_logging(context: WorkerContext) -> None:
    """Set up the logging of this worker; to be called once per process."""
    remember((*environment_secrets(), *context.session.secrets))
    formatter = hiding_formatter(f"%(asctime)s %(levelname)s [{context.address}] %(message)s")
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    problem: OSError | None = None
    if context.session.log_folder:
        try:
            file = _open(Path(context.session.log_folder), context)
        except OSError as error:
            problem = error
        else:
            handlers.append(logging.StreamHandler(file))
            place = context.placement
            rank = f"rank {place.rank} of {place.world_size} on node {place.cluster_node_rank} ({context.node_ip})"
            file.write(f"{_moment()} INFO [{context.address}] process {os.getpid()} is {rank}\n")
            sys.stdout = cast("TextIO", Tee(sys.stdout, file))
            sys.stderr = cast("TextIO", Tee(sys.stderr, file))
    for handler in handlers:
        handler.setFormatter(formatter)
    LOGGER.handlers[:] = handlers
    LOGGER.setLevel(env_vars.LOG_LEVEL.get())
    LOGGER.propagate = False
    if problem is not None:
        # A missing log does not fail the run: on another node the driver's folders may be missing or read-only.
        LOGGER.warning("this worker has no log file on its node: %s", problem)


def _open(folder: Path, context: WorkerContext) -> TextIO:
    group = context.address.root_group_name
    name = "_".join(map(str, context.address.ranks))
    # On another node the run's folder may not exist yet.
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A name such as `../x` must not lead out of the folder.
    component = re.sub(r"^\.+|/", "_", context.session.log_names.get(group, group))
    descriptor = open_log(folder.parent, f"{folder.name}/{component}/rank_{name}.log")
    return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace", buffering=1)


def _moment() -> str:
    """Return the current time in the loggers' format."""
    seconds = time.time()
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))},{int(seconds % 1 * 1000):03}"


class Tee:
    """A stream that also writes to a file; an error of the file, such as a full disk, is ignored.

    Known secret values are masked in both, unless split over several writes.
    """

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self._stream = stream
        self._file = file

    def write(self, text: str, /) -> int:
        masked = hidden(text)
        with suppress(OSError, ValueError):
            self._file.write(masked)
        self._stream.write(masked)
        return len(text)

    def writelines(self, lines: Iterable[str], /) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
