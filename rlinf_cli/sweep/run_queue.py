"""The queue of a sweep: starts its runs as `rlinf train` processes, that many at a time, and follows them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rlinf_cli.console.interrupts import command_signals
from rlinf_cli.console.subcommands import COMMAND
from rlinf_cli.sweep.grid import Point
from rlinf_cli.sweep.plan import SweepPlan, overrides_of
from rlinf_cli.sweep.sweep_folder import PointState, states
from rlinf_core.foreign.files import open_log
from rlinf_core.runners.storage.run_status import RunStatus

LOGS: Final = "logs"
# Seconds between two looks at the run folders.
_PAUSE: Final = 0.5

OnChange = Callable[[Mapping[str, PointState]], None]


class RunQueue:
    """The runs of a sweep that are still to be done.

    A run that was interrupted, killed or failed resumes from its newest checkpoint, or begins again without one. A run
    that outlived an earlier queue is waited for.

    Args:
        folder: the folder of the sweep.
        parallel: the maximum number of concurrent runs.
        on_change: called with the state of all runs at each look.
    """

    def __init__(self, plan: SweepPlan, folder: Path, parallel: int, on_change: OnChange) -> None:
        self._plan, self._folder, self._parallel, self._on_change = plan, folder, parallel, on_change
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._interrupted = False

    def work(self) -> dict[str, PointState]:
        """Run everything that is not finished, and return how each run ended.

        The first signal ends all runs as it ends `rlinf train`; a second one ends them at once.
        """
        with command_signals.calling(self._interrupt):
            try:
                return self._work()
            finally:
                self._end_children()

    def _work(self) -> dict[str, PointState]:
        current = states(self._folder, self._plan)
        outlived = {name for name, state in current.items() if state.status == RunStatus.RUNNING}
        pending = [
            point
            for point in self._plan.points
            if point.name not in outlived and current[point.name].status != RunStatus.FINISHED
        ]
        while True:
            for name in [name for name, child in self._children.items() if child.poll() is not None]:
                del self._children[name]
            outlived = {name for name in outlived if current[name].status == RunStatus.RUNNING}
            while pending and not self._interrupted and len(self._children) + len(outlived) < self._parallel:
                point = pending.pop(0)
                self._children[point.name] = self._start(point, current[point.name])
            current = self._shown(states(self._folder, self._plan))
            if not self._children and (self._interrupted or not (outlived or pending)):
                return current
            time.sleep(_PAUSE)

    def _shown(self, current: dict[str, PointState]) -> dict[str, PointState]:
        shown = {
            # Between its start and its run folder, and while it writes its report.
            name: state._replace(status=RunStatus.RUNNING, reason="") if name in self._children else state
            for name, state in current.items()
        }
        self._on_change(shown)
        return current

    def _start(self, point: Point, state: PointState) -> subprocess.Popen[bytes]:
        overrides = overrides_of(self._plan, point, self._folder)
        if state.run is not None and state.run.checkpoints.latest() is not None:
            overrides.append(f"runner.resume_dir={json.dumps(str(state.run.path))}")
        argv = [*COMMAND, "train", self._plan.file, *overrides]
        log = open_log(self._folder, f"{LOGS}/{point.name}.log")
        try:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is forwarded by this process alone.
                start_new_session=True,
            )
        finally:
            os.close(log)

    def _interrupt(self) -> None:
        self._interrupted = True
        for child in self._children.values():
            child.send_signal(signal.SIGINT)

    def _end_children(self) -> None:
        """End runs that are left: after a second signal at once, after an error of the queue cleanly."""
        for child in self._children.values():
            child.send_signal(signal.SIGINT)
        for child in self._children.values():
            child.wait()
