"""One run as `rlinf train` makes it, in a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rlinf_cli.console import COMMAND
from rlinf_core.env_vars import ADDRESS
from rlinf_core.errors import RunError
from rlinf_core.foreign.files import open_log
from rlinf_core.node.attach import LOCAL
from rlinf_core.node.process_life import identity_here
from rlinf_core.runners.metrics import metrics_in
from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.chaos.run_processes import RunProcesses

RESUME: Final = "runner.resume_dir=auto"
OUTPUT: Final = "output.log"
# Seconds between two looks.
PAUSE: Final = 0.02
_END_SECONDS: Final = 60.0


class StartedRun:
    """A run that is started in a new session, followed by its files, and ended at the end of the block.

    It has a Ray of its own, whatever `RLINF_ADDRESS` says: nothing of another job is in reach of its faults.

    Args:
        file, overrides: the file and overrides, as of `rlinf train`.
        folder: its folder, which has no other run; one of the same seed is replaced.
        groups: the component of each worker group.

    Attributes:
        began: when its command was started last, in monotonic seconds.
        step: the last step that has finished, so far.
    """

    def __init__(self, file: str, overrides: Sequence[str], folder: Path, groups: Mapping[str, str]) -> None:
        self._file, self._overrides, self.folder, self._groups = file, tuple(overrides), folder, groups
        self.began = 0.0
        self.step = 0
        self._written = 0
        try:
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
        except OSError as error:
            raise RunError("the folder cannot be replaced", where=str(folder), why=str(error)) from None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def start(self, *, resumed: bool = False) -> None:
        """Start its command; `resumed` goes on with the run that was interrupted."""
        log_path = f"runner.logger.log_path={self.folder}"
        argv = [*COMMAND, "train", self._file, *self._overrides, log_path, *([RESUME] if resumed else [])]
        log = open_log(self.folder, OUTPUT)
        try:
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, ADDRESS.name: LOCAL},
                start_new_session=True,
            )
        finally:
            os.close(log)
        self.began = time.monotonic()
        # Until this process waits for its child, the pid can mean no other.
        self.processes = RunProcesses(identity_here(self._child.pid), self._groups)

    def end(self) -> None:
        """End what is left of it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._child.poll() is None:
                self._child.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(_END_SECONDS)

    @property
    def code(self) -> int | None:
        """The exit code of its command; None while it runs."""
        return self._child.poll()

    @property
    def run(self) -> RunFolder | None:
        """Its run folder, once there is one."""
        return RunFolder.latest(self.folder)

    @property
    def printed(self) -> int:
        """The bytes that its command has printed so far."""
        return (self.folder / OUTPUT).stat().st_size

    def look(self) -> int:
        """Return how much it has written so far: a number that grows while it goes on."""
        run = self.run
        if run is None:
            return 0
        files = (run.metrics_file, run.path / run_events.EVENTS)
        written = sum(path.stat().st_size for path in files if path.exists())
        if written != self._written:
            self._written = written
            with contextlib.suppress(OSError):
                self.step = max([self.step, *(line.step for line in metrics_in(run.metrics_file))])
        return written
