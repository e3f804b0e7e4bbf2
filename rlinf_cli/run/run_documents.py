"""The documents that a run's driver writes: the current step, the files for other commands, and the end."""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlinf_cli.job.findings import without_effect
from rlinf_cli.live import labels
from rlinf_cli.live.progress import RunProgress
from rlinf_cli.live.view import View, relaunched
from rlinf_cli.runs.documents import ORIGINS, PLACEMENT, Provenance, collect, write_provenance
from rlinf_cli.runs.logs import last_lines
from rlinf_core.config.composing.origins import origins
from rlinf_core.config.secrets import mask, mask_text
from rlinf_core.errors import RLinfError, RunError
from rlinf_core.foreign.files import NO_ROOM
from rlinf_core.job.load import Job
from rlinf_core.process.known_secrets import hidden
from rlinf_core.runners import events
from rlinf_core.runners.recovery import Failure, failures_of, headline, position
from rlinf_core.runners.storage import durable, run_events
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.topology import ClusterTopology

LOGGER = logging.getLogger("rlinf")
# The state is written as a whole and synced, at intervals that keep the cost within 2 % of the run. The written step
# lags by milliseconds on a fast disk, and by at most `_SELDOM` seconds on a slow one.
_SHARE = 0.02
_SELDOM = 2.0


class StateWriter(View):
    """The writer of the current step to the run's state, at cheap intervals and before every long phase.

    If a step cannot be written, the run continues, and the next step is tried.
    """

    def __init__(self, progress: RunProgress, folder: RunFolder) -> None:
        super().__init__(progress)
        self._folder = folder
        self._next = progress.clock()
        self._warned = False

    def show(self, event: events.Event) -> None:
        if isinstance(event, events.RunStarted):
            self._folder.started()
        lasting = isinstance(event, events.CheckpointSaved | events.RunRestarted | events.RunFinished)
        began = self.progress.clock()
        if lasting or (isinstance(event, events.StepFinished) and began >= self._next):
            self._write()
            ended = self.progress.clock()
            self._next = ended + min(_SELDOM, (ended - began) / _SHARE)

    def _write(self) -> None:
        try:
            self._folder.update(step=self.progress.step)
        except RunError as error:
            if not self._warned:
                LOGGER.warning("the current step cannot be written to %s: %s", error.where, error.why)
            self._warned = True


class DocumentWriter(View):
    """The writer of a run's documents. They are optional: a failure is logged once."""

    def __init__(self, progress: RunProgress, job: Job, folder: RunFolder) -> None:
        super().__init__(progress)
        self._job, self._folder = job, folder
        self._pending: dict[str, str] = {}
        self._provenance: Future[Provenance] | None = None
        self._warned = False
        self._keep(self._origins())

    def show(self, event: events.Event) -> None:
        if self._provenance is None:
            self._provenance = self._collect()
        if isinstance(event, events.ClusterReady):
            self._keep(self._placement(event.topology))
        elif isinstance(event, events.RunStarted):
            self._write_pending()
            provenance = self._provenance
            self._guarded(lambda: write_provenance(self._folder.path, provenance.result()))
            counts = ", ".join(f"{name} {count}" for name, count in event.components.items())
            begin = event.first_step - 1
            if event.resumed_from is not None:
                self.add_event(run_events.RESUMED, begin, f"resumed from {event.resumed_from.name} with {counts}")
            else:
                self.add_event(run_events.STARTED, begin, f"started with {counts}", self._unread())
        elif isinstance(event, events.RunRestarted):
            what = f"restart {event.restart} of at most {event.max_restarts}, back to step {event.step}"
            self.add_event(run_events.RESTARTED, event.step, event.reason, [what, *event.details])
        elif isinstance(event, events.WorkersRelaunched):
            what = f"restart {event.restart} of at most {event.max_restarts}: {relaunched(event)}"
            self.add_event(run_events.RELAUNCHED, event.step, event.reason, [what, *event.details])
        elif isinstance(event, events.Evaluated) and event.metrics.get("eval/left_out"):
            text = labels.figures_text(labels.headlines(event.metrics, "eval"))
            self.add_event(run_events.INCOMPLETE, event.step, f"the evaluation is incomplete: {text}")
        elif isinstance(event, events.NodesChanged):
            self.add_event(run_events.NODES, event.step, event.text, event.details)
        elif isinstance(event, events.ItemsResumed):
            items = [f"{fate}: {item}" for fate, items in event.fates.items() for item in items]
            self.add_event(run_events.ITEMS, event.step, events.fates_line(event.fates), items)

    def _collect(self) -> Future[Provenance]:
        """Start collecting the run's provenance in the background, because git may be slow."""
        recipe = self._job.recipe
        packages = {"rlinf_core", *([recipe.package] if recipe is not None else [])}
        inputs = recipe.load(recipe.inputs) if recipe is not None else None
        background = ThreadPoolExecutor(1, thread_name_prefix="provenance")
        provenance = background.submit(collect, sorted(packages), inputs(self._job.config) if inputs else ())
        background.shutdown(wait=False)
        return provenance

    def _unread(self) -> list[str]:
        """Return the keys of the file without effect, each with its location and the reason."""
        return [f"{diagnostic.span}: {diagnostic.message}" for diagnostic in without_effect(self._job.diagnostics)]

    def add_event(self, kind: str, step: int, text: str, details: Sequence[str] = ()) -> None:
        """Add an event to the run's events."""

        def masked(line: str) -> str:
            return hidden(mask_text(line))

        lines = [masked(line) for detail in details for line in detail.splitlines()]
        first = masked(text.splitlines()[0])
        self._guarded(lambda: run_events.append_event(self._folder.path, kind, step, first, lines))

    def _keep(self, documents: dict[str, str]) -> None:
        self._pending |= documents
        # The folder of a resumed run is not modified until its workers have started.
        if self._folder.state.earlier is None:
            self._write_pending()

    def _write_pending(self) -> None:
        documents, self._pending = self._pending, {}
        for name, text in documents.items():
            self._guarded(lambda name=name, text=text: durable.write_whole(self._folder.path / name, text))

    def _guarded(self, write: Any) -> None:
        try:
            write()
        except OSError as error:
            if not self._warned:
                LOGGER.warning("a part of the report's data was not saved: %s", error)
            self._warned = True

    def _origins(self) -> dict[str, str]:
        from rlinf_cli.job.views import config_record

        if self._job.tree is None:
            return {}
        tree = mask(self._job.tree, self._job.secret)
        return {ORIGINS: _json(config_record(origins(tree, self._job.config)))}

    def _placement(self, topology: ClusterTopology) -> dict[str, str]:
        from rlinf_cli.job.job_file import sound
        from rlinf_cli.job.job_layout import lay_out
        from rlinf_cli.job.picture import picture_of, picture_record
        from rlinf_cli.job.views import placement_record

        try:
            parts = sound(self._job)._replace(topology=topology)
            layout = lay_out(parts, "placement", self._job.name)
        except RLinfError:
            return {}
        title = Path(parts.name).name
        picture = picture_of(title, parts.cluster, topology, layout.placements, layout.mode)
        return {PLACEMENT: _json({**placement_record(parts, layout), "picture": picture_record(picture)})}


def _json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False) + "\n"


# Seconds that the end of a run waits for free space for its folder, and seconds between two attempts.
_ROOM_SECONDS: Final = 10.0
_ROOM_PAUSE: Final = 0.25


def record_end(
    folder: RunFolder, step: int | None, status: str, reason: str = "", *, at_once: bool = False
) -> RLinfError | None:
    """Write the end status and the last finished step; return the error that prevents this, if any.

    A full file system may have free space again in seconds, so the function retries to keep the reason for the end.

    Args:
        folder: the folder of the run.
        step: the last finished step; None if the run had not started.
        status: the end status.
        reason: why the run ended.
        at_once: whether to try only once, as after a second signal.
    """
    deadline = time.monotonic() + (0.0 if at_once else _ROOM_SECONDS)
    while True:
        try:
            if step is not None:
                folder.update(step=step)
            folder.end(status, reason)
        except RLinfError as error:
            lacks_room = isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_ROOM
            if not lacks_room or time.monotonic() >= deadline:
                return error
            time.sleep(_ROOM_PAUSE)
        else:
            return None


LOG_LINES = 10
_MOST_NAMED = 6


class FailureReport(NamedTuple):
    """A failed job in the parts of an error block."""

    what: str
    where: str | None
    why: str | None
    do: str | None


def failure_block(
    error: BaseException, logs: Path | None, run: str | None, components: Mapping[str, str] | None = None
) -> FailureReport:
    """Return the error block of the first failure.

    Args:
        error: the exception of the recipe's program.
        logs: the folder of the run's logs, or None.
        run: the argument for `rlinf logs`, or None.
        components: the component of each worker group whose name differs.
    """
    first, *others = failures_of(error)
    component = (components or {}).get(first.group, first.group) if first.group is not None else None
    named = f"component `{component}`" if component != first.group else None
    where = [part for part in (named, first.place, position(first.error)) if part]
    log = logs / component / f"rank_{first.rank}.log" if logs and component is not None else None
    tail = last_lines(log, LOG_LINES) if log else []
    why: list[str] = []
    if isinstance(first.error, RLinfError):
        where.extend([first.error.where] if first.error.where and first.error.where != first.name else [])
        why.extend(first.error.why.splitlines() if first.error.why else [])
    if tail:
        why.extend(["last log lines", *(f"  {line}" for line in tail)])
    if others:
        why.append(_folded(others))
    return FailureReport(
        headline(first), "; ".join(where) or None, "\n".join(why) or None, _advice(first, component, log, run)
    )


def _folded(others: Sequence[Failure]) -> str:
    """Return the other failures, as in `because of it also failed: env:0, env:1 (ChannelClosed)`."""
    by_kind: dict[str, list[str]] = {}
    for failure in others[:_MOST_NAMED]:
        by_kind.setdefault(type(failure.error).__name__, []).append(failure.name)
    listed = ", ".join(f"{', '.join(names)} ({kind})" for kind, names in by_kind.items())
    others_text = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    return f"{'because of it' if others[0].consequence else 'besides it'} also failed: {listed}{others_text}"


def _advice(first: Failure, component: str | None, log: Path | None, run: str | None) -> str:
    lines: list[str] = []
    if isinstance(first.error, RLinfError) and first.error.help:
        lines.append(first.error.help)
    if log is not None and log.exists() and run is not None:
        lines.append(f"`rlinf logs {shlex.quote(run)} {component}:{first.rank}` shows its log")
    if not lines or not isinstance(first.error, RLinfError):
        lines.append("`--verbose` shows the traceback")
    return "\n".join(lines)
