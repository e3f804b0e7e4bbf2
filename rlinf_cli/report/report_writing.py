"""The report at the end of a run, written by a separate process so that it can neither fail nor delay the run."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rlinf_cli.console.console import COMMAND, reason
from rlinf_core import env_vars
from rlinf_core.errors import EnvironmentVariableError
from rlinf_core.process.requirements import install_command, missing_modules

NAME: Final = "report.html"
# Modules that a report needs.
MODULES: Final = ("jinja2", "vl_convert")
# The first report of an installation bundles the chart library's code, which takes seconds.
PATIENCE_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.05


def write_report_at_end(folder: Path, warn: Callable[[str], None], stopped: Callable[[], bool]) -> Path | None:
    """Write `report.html` into the run folder; return its path, or None after calling `warn`.

    Args:
        folder: the folder of a finished run.
        warn: called with the reason if no report is written.
        stopped: polled; True if the user wants the command to end now.
    """
    try:
        if not env_vars.REPORT.get():
            return None
    except EnvironmentVariableError as error:
        warn(f"no report: {error.message}")
        return None
    missing = missing_modules(MODULES)
    if missing:
        warn(f"no report: packages are missing; `{install_command(*missing)}` installs them")
        return None
    try:
        process = subprocess.Popen(
            [*COMMAND, "report", str(folder), "--quiet"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        warn(f"no report: {error}")
        return None
    with process:
        why = _wait(process, stopped)
        stderr = b"" if why is not None or process.stderr is None else process.stderr.read()
    path = folder / NAME
    if why is None and process.returncode == 0 and path.exists():
        return path
    why = why or reason(stderr.decode(errors="replace"), process.returncode)
    warn(f"no report: {why}; `rlinf report {shlex.quote(str(folder))}` tries again")
    return None


def _wait(process: subprocess.Popen[bytes], stopped: Callable[[], bool]) -> str | None:
    """Wait for a process; return why it was terminated, or None if it ended on its own."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None:
        late = time.monotonic() > deadline
        if late or stopped():
            process.kill()
            process.wait()
            return f"it took longer than {PATIENCE_SECONDS:.0f} s" if late else "interrupted"
        time.sleep(_LOOK_SECONDS)
    return None
