"""CPU time of a run of a recipe: of the driver, the workers, and everything of the Ray that it has started."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.runners.events import CheckpointSaved, Evaluated, Event, RunStarted, StepFinished

# The number of the last mark.
END = -1
TICKS = os.sysconf("SC_CLK_TCK")
# Parts of the command lines of processes that are there whatever the workers do: Ray's own, and two kinds of ours.
BACKGROUND = (
    b"/ray/core/src/",
    b"log_monitor.py",
    b"DashboardAgent",
    b"RuntimeEnvAgent",
    b"ManagerProcess",
    b"ChannelProcess",
)


def cpu_seconds(background: set[int] | None = None) -> dict[int, float]:
    """Return CPU seconds by process, of this one and of everything below the Ray that it has started.

    `background` is given the numbers of this process and of those of `BACKGROUND`.
    """
    ray = ray_api()
    session = ray._private.worker._global_node.get_session_dir_path()
    rows: dict[int, tuple[int, float]] = {}
    if background is not None:
        background.add(os.getpid())
    roots = {os.getpid()}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        rows[int(name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
        if session.encode() in command:
            roots.add(int(name))
        if background is not None and any(part in command for part in BACKGROUND):
            background.add(int(name))

    def ours(pid: int) -> bool:
        while pid in rows:
            if pid in roots:
                return True
            pid = rows[pid][0]
        return False

    return {pid: seconds for pid, (_, seconds) in rows.items() if ours(pid)}


class Meter:
    """A listener to a run that keeps the CPU time of all its processes.

    Attributes:
        marks: CPU seconds by process and the wall clock, when the workers were there (0), after each step asked for,
            and after the last evaluation or checkpoint (`END`).
        evaluations: metrics of evaluations, by step.
        times: metrics of every step.
        startup: seconds until training began.
        background: numbers of the driver and of processes of `BACKGROUND`.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = set(steps)
        self.marks: dict[int, tuple[dict[int, float], float]] = {}
        self.evaluations: dict[int, dict[str, float]] = {}
        self.times: list[dict[str, float]] = []
        self._made = time.monotonic()
        self.startup = 0.0
        self.background: set[int] = set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.startup = time.monotonic() - self._made
            self.marks[0] = cpu_seconds(self.background), time.monotonic()
        elif isinstance(event, StepFinished):
            self.times.append(dict(event.metrics))
            if event.step in self.steps:
                self.marks[event.step] = cpu_seconds(self.background), time.monotonic()
        elif isinstance(event, Evaluated):
            self.evaluations[event.step] = dict(event.metrics)
        if isinstance(event, Evaluated | CheckpointSaved):
            self.marks[END] = cpu_seconds(self.background), time.monotonic()

    def cpu(self, first: int, last: int) -> float:
        """Return CPU seconds between two marks."""
        return sum(self._between(first, last).values())

    def background_cpu(self, first: int, last: int) -> float:
        """Return those of `cpu` that the processes of `background` took."""
        return sum(seconds for pid, seconds in self._between(first, last).items() if pid in self.background)

    def _between(self, first: int, last: int) -> dict[int, float]:
        before, after = self.marks[first][0], self.marks[last][0]
        return {pid: seconds - before.get(pid, 0.0) for pid, seconds in after.items()}

    def cpu_in_all(self) -> float:
        """Return CPU seconds from the first process to the mark `END`, start-up and imports included."""
        return sum(self.marks[END][0].values())

    def wall(self, first: int, last: int) -> float:
        """Return seconds between two marks."""
        return self.marks[last][1] - self.marks[first][1]
