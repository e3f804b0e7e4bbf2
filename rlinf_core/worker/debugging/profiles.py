"""Profiles of this worker's process."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from rlinf_core.foreign.files import write_fault
from rlinf_core.node.stacks import install_spy, py_spy

LOGGER = logging.getLogger("rlinf")
# The time limit for a profiler to write its file.
_END_SECONDS: Final = 20.0
# The option of prctl(2) that names a process which Yama lets trace this one, besides its ancestors.
_SET_TRACER: Final = 0x59616D61


def start_profile(kind: str, file: str) -> Profile | None:
    """Begin a profile of this process; None if it is impossible, with a warning unless torch is not imported.

    `stop` writes the file. If that fails, it is logged and does not end the run.
    """
    path = Path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link is replaced, not followed.
        path.unlink(missing_ok=True)
        return _Sampled(path) if kind == "py-spy" else _Operators(path) if "torch" in sys.modules else None
    except (OSError, RuntimeError) as error:
        LOGGER.warning("no profile of this worker: %s", error)
        return None


class _Operators:
    """torch's profile of the operators and kernels that the calling thread starts."""

    def __init__(self, path: Path) -> None:
        from torch import profiler

        self._path = path
        self._profile: Any = profiler.profile()
        self._profile.start()

    def stop(self) -> None:
        try:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            LOGGER.warning("the profile of this worker cannot be written: %s", write_fault(self._path, error))


class _Sampled:
    """py-spy's sampled profile of this process and of those that it started."""

    def __init__(self, path: Path) -> None:
        program = py_spy()
        if program is None:
            raise RuntimeError(f"py-spy is not installed here: `{install_spy()}`")
        self._path = path
        command = [program, "record", "--pid", str(os.getpid()), "--format", "speedscope", "--output", str(path)]
        # Ray's workers may block SIGINT, which must end py-spy; a child process inherits the blocked signals.
        earlier = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [*command, "--subprocesses"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SET_TRACER, self._process.pid, 0, 0, 0)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            _, printed = self._process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            printed = self._process.communicate()[1]
        if not self._path.exists():
            LOGGER.warning("py-spy wrote no profile of this worker: %s", " ".join(printed.split()) or "it said nothing")


Profile: TypeAlias = _Operators | _Sampled
