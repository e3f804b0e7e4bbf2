"""Output of Ray: what workers print is shown. What Ray's own processes tell goes to the driver's log.

Ray would print both to standard output, where its notices tear lines of the user's program apart, and would lose what
is on its way when the program ends.
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

# Whose lines these are, where those of workers have a process number.
_RAYS_OWN: Final = frozenset({"raylet", "gcs_server", "autoscaler", "runtime_env"})
# rlinf tells of a death itself, with the worker's name and why it died; it starts more processes than cores on purpose.
_KNOWN: Final = ("A worker died or was killed", "worker processes have been started on node")
# Ray takes these out of what workers print, and all before it of what its own processes write.
_MARKS: Final = (b":job_id:", b":actor_name:", b":task_name:")
_INFORMATION: Final = ":info_message:"
# Ray looks for new files each half second and for new lines each tenth, more often where there are some.
_LATEST_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.02

# How many lines were shown, by process and whether they are of its standard error.
_shown: Counter[tuple[int, bool]] = Counter()


def keep_plain() -> None:
    """Have Ray neither colour the names of workers nor fold lines where a program reads them. Before Ray is imported.

    Ray does both wherever its lines go, unless these variables are set; what the user has set stays.
    """
    streams = (sys.stdout, sys.stderr)
    if not all(stream.isatty() for stream in streams) or os.environ.get("NO_COLOR"):
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")


@cache  # once in a process: a second Ray of this process shows its lines by the same function
def take_over() -> None:
    """From now on Ray's own lines are logged: its warnings as such, what it writes to files for who debugs."""
    worker: Any = ray_module("ray._private.worker")
    show = worker.print_to_stdstream

    # The names of the parameters are Ray's.
    def show_or_log(data: dict[str, Any], ignore_prefix: bool) -> None:
        source, lines = data.get("pid"), data.get("lines", ())
        if source in _RAYS_OWN:
            # What comes from a file says of which job it is.
            _log(str(source), lines, from_file="job" in data)
            return
        show(data, ignore_prefix)
        if isinstance(source, int):
            _shown[source, bool(data.get("is_err"))] += len(lines)

    worker.print_to_stdstream = show_or_log


def _log(source: str, lines: list[str], *, from_file: bool) -> None:
    for line in lines:
        text = line.partition(_INFORMATION)[2] or line
        if from_file:
            level = logging.DEBUG
        else:
            level = logging.INFO if any(each in text for each in _KNOWN) else logging.WARNING
        LOGGER.log(level, "Ray's %s: %s", source, text)


def show_the_rest(folder: Path) -> None:
    """Wait until what the workers of an embedded Ray have printed was shown, for a second at most.

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
