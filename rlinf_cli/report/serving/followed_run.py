"""A run that is followed while it runs: what has changed in its folder is read again, and nothing else."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from rlinf_cli.live.driver_log import DRIVER
from rlinf_cli.report.gathering import RunContent, StepTimeline, gather, newest_timeline
from rlinf_cli.report.series import RunSeries, series_of
from rlinf_cli.run.run_documents import ORIGINS, PICTURE, PLACEMENT
from rlinf_cli.runs import answer_samples
from rlinf_cli.why.diagnosis import Diagnosis, diagnose
from rlinf_cli.why.facts import read_facts
from rlinf_core.errors import RunError
from rlinf_core.runners.metrics import Metrics, MetricsTail, sampled_metrics
from rlinf_core.runners.storage import first_contact, run_events
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import STATE
from rlinf_core.runners.storage.run_status import RunStatus

_DRIVER_LOG: Final = f"logs/{DRIVER}/rank_0.log"
# Files beside metrics whose change shows; folders, too.
_SHOWN: Final = (
    *(STATE, ORIGINS, PICTURE, PLACEMENT, run_events.FILE, first_contact.FILE, answer_samples.FOLDER),
    *("config.yaml", "environment.json", "memory.json", "videos", _DRIVER_LOG),
)
_MOST_THOROUGH_BYTES: Final = 8 << 20
_MOST_RECENT: Final = 2000
# Lines from all over a long file, by which it is shown until it has been read.
_OVERVIEW_LINES: Final = 300
# Between two looks at what takes longer to read.
_LOOK_SECONDS: Final = 5.0
Signature = tuple[tuple[int, int, int] | None, ...]


class FollowedRun:
    """A run and what its page shows.

    Attributes:
        version: grows when anything has changed.
        reading: whether metrics are left to be read, as when a long run is opened.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.version = 0
        self.reading = True
        self._tail = MetricsTail(folder.metrics_file)
        self._series = RunSeries()
        # What is shown instead of a part of the series.
        self._overview: RunSeries | None = None
        self._signature: Signature | None = None
        self._status = ""
        self._content: RunContent | None = None
        self._fault = ""
        # The newest steps, by which an active run is diagnosed.
        self._recent: deque[Metrics] = deque(maxlen=_MOST_RECENT)
        self._diagnosis: Diagnosis | None = None
        self._timelines: Sequence[StepTimeline] = ()
        self._looked = -math.inf

    @property
    def series(self) -> RunSeries:
        """All metrics; of a long run some from all over it, until all are read."""
        return self._overview or self._series

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.path.name

    @property
    def status(self) -> str:
        """The status as `refresh` saw it."""
        return self._status

    def refresh(self, seconds: float) -> None:
        """Read what is new, for about `seconds`; the version grows if there is something."""
        with suppress(RunError):
            self.folder.refresh()
        status = self.folder.state.outcome[0]
        signature = tuple(_signature(self.folder.path / name) for name in _SHOWN)
        fresh = self._read_metrics(seconds)
        if fresh or (status, signature) != (self._status, self._signature):
            self.version += 1
        if (status, signature) != (self._status, self._signature):
            self._content = None
            self._status, self._signature = status, signature

    def content(self) -> RunContent:
        """Return what the page shows."""
        if self._content is None:
            # The trace is read when it is whole.
            self._content = gather(self.folder, self.series, thorough=self._over and self._short())
        diagnosis, timelines = self._content.diagnosis, self._content.timelines
        if not self._over:
            self._look()
            diagnosis, timelines = self._diagnosis, self._timelines
        status, reason = self.folder.state.outcome
        notes = [*self._content.notes, *([self._fault] if self._fault else [])]
        return replace(
            self._content.with_series(self.series),
            status=status,
            reason=reason,
            notes=notes,
            diagnosis=diagnosis,
            timelines=timelines,
            made=time.time(),
        )

    @property
    def _over(self) -> bool:
        return self._status not in (RunStatus.RUNNING, RunStatus.UNKNOWN)

    def _look(self) -> None:
        """Look, every few seconds, for causes in the newest steps of an active run, and for a timeline."""
        if time.monotonic() - self._looked > _LOOK_SECONDS and not self.reading:
            self._diagnosis = diagnose(read_facts(self.folder, list(self._recent)))
            self._timelines = newest_timeline(self.folder, self._series)
            self._looked = time.monotonic()

    def _short(self) -> bool:
        """Return whether metrics and trace are short enough to be read while a reader waits."""
        files = (self.folder.metrics_file, self.folder.trace_file)
        return sum(file.stat().st_size for file in files if file.exists()) < _MOST_THOROUGH_BYTES

    def _read_metrics(self, seconds: float) -> bool:
        """Read new metrics; return whether there are some."""
        try:
            part = self._tail.read(seconds)
        except OSError as error:
            self.reading = False
            fault = f"{self._tail.path.name} cannot be read: it {error.strerror}"
            changed, self._fault = fault != self._fault, fault
            return changed
        self._fault = ""
        if part.restarted:
            self._series, self._overview = RunSeries(), None
            self._recent.clear()
        elif part.replaced:
            self._series.drop_step(part.lines[0].step)
            self._recent.pop()
        self._series.add(part.lines)
        self._recent.extend(part.lines)
        shown, self.reading = self._overview, not part.at_end
        if self.reading and self._overview is None:
            self._overview = series_of(sampled_metrics(self._tail.path, _OVERVIEW_LINES))
        elif not self.reading:
            self._overview = None
        # While the rest is read, the page stays as it is.
        return self._overview is not shown or (not self.reading and (bool(part.lines) or part.restarted))


def refresh_all(runs: Iterable[FollowedRun], seconds: float) -> None:
    """Refresh runs within about `seconds` together; those that come late are read on at the next call."""
    deadline = time.monotonic() + seconds
    for run in runs:
        run.refresh(max(0.0, deadline - time.monotonic()))


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns
