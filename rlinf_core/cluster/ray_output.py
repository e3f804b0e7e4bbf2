"""Output of Ray: worker output is shown; messages of Ray's own processes go to the driver's log.

Ray would print both to standard output, where its notices break lines of the user's program, and would lose pending
lines at exit.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Final

from rlinf_core.cluster.ray_private import ray_module

LOGGER = logging.getLogger("rlinf")

# Sources of Ray's own lines; worker lines have a process number instead.
_RAYS_OWN: Final = frozenset({"raylet", "gcs_server", "autoscaler", "runtime_env"})
# rlinf reports deaths itself, with worker name and cause; and it starts more processes than cores on purpose.
_KNOWN: Final = ("A worker died or was killed", "worker processes have been started on node")
# Ray strips this from worker lines, and everything before it from its own processes' lines.
_MARKS: Final = (b":job_id:", b":actor_name:", b":task_name:")
_INFORMATION: Final = ":info_message:"
# What follows is in the evidence of the death, which rlinf names.
_LOG_TAIL: Final = " Last 20 lines of the Raylet logs:"
# Ray polls for new files every half second and for new lines every tenth, more often if there are any.
_LATEST_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.02

# Number of shown lines, by process and stream.
_shown: Counter[tuple[int, bool]] = Counter()


def keep_plain() -> None:
    """Stop Ray from colouring worker names and merging repeated lines when output is not a terminal. Call before
    importing Ray.

    Ray does both everywhere unless these variables are set; the user's settings are kept.
    """
    streams = (sys.stdout, sys.stderr)
    if not all(stream.isatty() for stream in streams) or os.environ.get("NO_COLOR"):
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")


@cache  # once per process: a second Ray uses the same function
def take_over() -> None:
    """Redirect Ray's own lines to the log: its warnings as warnings, lines of its log files as debug messages."""
    worker: Any = ray_module("ray._private.worker")
    show = worker.print_to_stdstream

    # The names of the parameters are Ray's.
    def show_or_log(data: dict[str, Any], ignore_prefix: bool) -> None:
        source, lines = data.get("pid"), data.get("lines", ())
        if source in _RAYS_OWN:
            # Lines from a file carry their job.
            _log(str(source), lines, from_file="job" in data)
            return
        show(data, ignore_prefix)
        if isinstance(source, int):
            _shown[source, bool(data.get("is_err"))] += len(lines)

    worker.print_to_stdstream = show_or_log


def _log(source: str, lines: list[str], *, from_file: bool) -> None:
    for line in lines:
        text = (line.partition(_INFORMATION)[2] or line).partition(_LOG_TAIL)[0]
        if from_file:
            level = logging.DEBUG
        else:
            level = logging.INFO if any(phrase in text for phrase in _KNOWN) else logging.WARNING
        LOGGER.log(level, "Ray's %s: %s", source, text)


def show_the_rest(folder: Path) -> None:
    """Wait up to a second until the output of an embedded Ray's workers has been shown.

    Args:
        folder: the folder of that Ray.
    """
    until = time.monotonic() + _LATEST_SECONDS
    for file in (folder / "session_latest" / "logs").glob("worker-*-*-*.*"):
        try:
            # `worker-WORKER-JOB-PROCESS.out`, or `.err`
            source = int(file.stem.rpartition("-")[2]), file.suffix == ".err"
            printed = 0
            if time.time() - file.stat().st_mtime < 2 * _LATEST_SECONDS:
                with file.open("rb") as content:
                    printed = sum(not line.startswith(_MARKS) for line in content)
        except (OSError, ValueError):
            continue
        while _shown[source] < printed and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
