"""The trace of a run: the activities of every process, as a file for chrome://tracing and ui.perfetto.dev.

Each process is a row with its threads and tasks; below them are transfers between processes. Times are consistent on
one machine; between machines they differ by clock skew.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from rlinf_core.errors import RLinfError, RunError
from rlinf_core.foreign.files import write_fault
from rlinf_core.process import activity
from rlinf_core.process.activity import Taken, TraceSpan
from rlinf_core.runners import events
from rlinf_core.runners.events import Event, Listener
from rlinf_core.runners.storage import durable

if TYPE_CHECKING:
    from rlinf_core.worker.handle import WorkerGroupHandle
    from rlinf_core.worker.worker_group import WorkerGroup

LOGGER = logging.getLogger("rlinf")
DRIVER: Final = "driver"
# About 300 MB, the limit of viewers.
MOST_EVENTS: Final = 2_000_000
_LAST_WORDS_SECONDS: Final = 5.0
# At these events the workers are new or gone, so the end of the previous phase is unknown.
_NO_END_OF_A_PHASE: Final = (events.RunStarted, events.RunFinished)


class TraceWriter:
    """A writer of the trace during the run, so that it is readable even if the run is killed.

    Args:
        path: the file; an existing one is renamed with a number.
        most: the maximum number of events; further ones are only counted.

    Raises:
        RunError: the file cannot be written.
    """

    def __init__(self, path: Path, most: int = MOST_EVENTS) -> None:
        self.path = path
        self.dropped = 0
        self._left = most
        self._failed = False
        self._numbers: dict[str, int] = {}
        self._task_keys: dict[tuple[str, int], int] = {}
        self._transfers = 0
        self._pending: dict[str, WorkerGroupHandle[Taken]] = {}
        self._phase: tuple[str, float] | None = None
        try:
            durable.keep_old(path)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._file = os.fdopen(descriptor, "w", encoding="utf-8")
            # The format does not require the closing bracket, so a killed run leaves a valid trace, too.
            self._file.write("[\n")
        except OSError as error:
            raise RunError("the trace cannot be written", where=str(path), why=write_fault(path, error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def collect(self, groups: Iterable[WorkerGroup[Any]], *, last: bool = False) -> None:
        """Collect the spans of the groups' processes; busy or dead ones are asked again the next time.

        With `last` it waits up to five seconds for each group.
        """
        self.add(DRIVER, activity.take())
        for group in groups:
            name = group.worker_group_name
            if name in self._pending and (last or self._pending[name].done()):
                self._answer(name, self._pending.pop(name))
            if name not in self._pending:
                with suppress(RLinfError):
                    self._pending[name] = group.take_spans()
            if last and name in self._pending:
                self._answer(name, self._pending.pop(name))
        self._try(self._file.flush)

    def forget(self) -> None:
        """Forget the pending answers of groups that are gone."""
        self._pending.clear()

    def add(self, process: str, recorded: Taken) -> None:
        """Write the spans of one process, named for example `actor:0`."""
        self.dropped += recorded.dropped
        for span in recorded.spans:
            for event in self._events(process, span):
                self._write(event)

    def listening(self, listener: Listener) -> Listener:
        """Return a listener that calls `listener`, and records the phases of the run as spans of the driver."""

        def listen(event: Event) -> None:
            now = time.time()
            if self._phase is not None and not isinstance(event, _NO_END_OF_A_PHASE):
                phase, began = self._phase
                self.add(DRIVER, Taken([TraceSpan("phase", phase, began, now - began, 0)], 0))
            self._phase = (event.phase, now) if isinstance(event, events.PhaseStarted) else None
            listener(event)

        return listen

    def close(self) -> None:
        """Finish the file. Idempotent."""
        if self._file.closed:
            return
        self.add(DRIVER, activity.take())
        end = {"name": "dropped", "ph": "M", "pid": 0, "args": {"events": self.dropped}}
        # The last event has no trailing comma.
        self._try(lambda: self._file.write(json.dumps(end) + "\n]\n"))
        self._try(self._file.close)

    def _answer(self, group: str, handle: WorkerGroupHandle[Taken]) -> None:
        try:
            recorded = handle.wait(_LAST_WORDS_SECONDS)
        except RLinfError:
            return
        for rank, spans in enumerate(recorded):
            self.add(f"{group}:{rank}", spans)

    def _events(self, process: str, span: TraceSpan) -> Iterator[Mapping[str, Any]]:
        """Yield a span as trace events, preceded by the name of a new process or thread."""
        number = self._numbers.get(process)
        if number is None:
            number = self._numbers[process] = len(self._numbers)
            yield {"name": "process_name", "ph": "M", "pid": number, "args": {"name": process}}
            yield {"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}}
        start, microseconds = span.began * 1e6, span.seconds * 1e6
        event = {"name": span.name, "cat": span.kind, "pid": number}
        if span.kind == activity.TRANSFER:
            # Transfers may overlap, so they are asynchronous events with separate rows.
            self._transfers += 1
            yield {**event, "ph": "b", "id": self._transfers, "tid": 0, "ts": start}
            yield {**event, "ph": "e", "id": self._transfers, "tid": 0, "ts": start + microseconds}
            return
        task_key = self._task_keys.get((process, span.task_key))
        if task_key is None:
            task_key = self._task_keys[process, span.task_key] = len(self._task_keys) + 1
            name = "phases" if span.kind == "phase" else f"task_key {task_key}"
            yield {"name": "thread_name", "ph": "M", "pid": number, "tid": task_key, "args": {"name": name}}
        yield {**event, "ph": "X", "tid": task_key, "ts": start, "dur": microseconds}

    def _write(self, event: Mapping[str, Any]) -> None:
        if self._left <= 0:
            self.dropped += 1
            return
        self._left -= 1
        self._try(lambda: self._file.write(json.dumps(event, separators=(",", ":")) + ",\n"))

    def _try(self, write: Callable[[], object]) -> None:
        """Call `write`; if it fails, as on a full disk, end the trace with a warning: the run continues."""
        try:
            write()
        except OSError as error:
            self._left = 0
            if not self._failed:
                self._failed = True
                LOGGER.warning("the trace is incomplete, %s: %s", self.path, write_fault(self.path, error))
