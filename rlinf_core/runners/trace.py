"""The trace of a run: what every process did and when, as a file that chrome://tracing and ui.perfetto.dev open.

Each process is a row with its threads and tasks; below them what was under way between processes. Moments of processes
on one machine agree; between machines they differ as clocks do.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, Self

from rlinf_core.errors import RLinfError, RunError
from rlinf_core.process import tracing
from rlinf_core.process.tracing import Taken, TraceSpan
from rlinf_core.runners import events
from rlinf_core.runners.events import Event, Listener
from rlinf_core.runners.storage import durable

DRIVER: Final = "driver"
# About 300 MB; a viewer takes no more.
MOST_EVENTS: Final = 2_000_000
_LAST_WORDS_SECONDS: Final = 5.0
# By then the workers are others, or gone: when the phase before ended is not known.
_NO_END_OF_A_PHASE: Final = (events.RunStarted, events.RunFinished, events.CurveDrawn)


class SpansHandle(Protocol):
    """The spans of a group, asked for; `WorkerGroupHandle` is one."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> list[Taken]: ...


class Traced(Protocol):
    """A group whose workers record spans; `WorkerGroup` is one."""

    @property
    def worker_group_name(self) -> str: ...
    def take_spans(self) -> SpansHandle: ...


class TraceWriter:
    """Writes the trace while the run goes on, so that it is readable also when the run is killed.

    Args:
        path: the file; one of before gets a number.
        most: how many events it may have; later ones are counted only.

    Raises:
        RunError: the file cannot be written.
    """

    def __init__(self, path: Path, most: int = MOST_EVENTS) -> None:
        self.path = path
        self.dropped = 0
        self._left = most
        self._numbers: dict[str, int] = {}
        self._task_keys: dict[tuple[str, int], int] = {}
        self._transfers = 0
        self._pending: dict[str, SpansHandle] = {}
        self._phase: tuple[str, float] | None = None
        try:
            durable.keep_old(path)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._file = os.fdopen(descriptor, "w", encoding="utf-8")
            # The format does without the closing bracket, so that a run that is killed leaves a trace, too.
            self._file.write("[\n")
        except OSError as error:
            raise RunError("the trace cannot be written", where=str(path), why=error.strerror or str(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def collect(self, groups: Iterable[Traced], *, last: bool = False) -> None:
        """Take what the processes of the groups recorded; those that are busy, or died, are asked again the next time.

        With `last` it waits up to five seconds for each.
        """
        self.add(DRIVER, tracing.take())
        for group in groups:
            name = group.worker_group_name
            if name in self._pending and (last or self._pending[name].done()):
                self._answer(name, self._pending.pop(name))
            if name not in self._pending:
                with suppress(RLinfError):
                    self._pending[name] = group.take_spans()
            if last and name in self._pending:
                self._answer(name, self._pending.pop(name))
        self._file.flush()

    def forget(self) -> None:
        """Forget the groups that were asked, which are gone: what they did not answer is lost."""
        self._pending.clear()

    def add(self, process: str, recorded: Taken) -> None:
        """Write what one process recorded; its name is as in `actor:0`."""
        self.dropped += recorded.dropped
        for span in recorded.spans:
            for event in self._events(process, span):
                self._write(event)

    def listening(self, listener: Listener) -> Listener:
        """Return `listener`, and the phases of the run as spans of the driver."""

        def listen(event: Event) -> None:
            now = time.time()
            if self._phase is not None and not isinstance(event, _NO_END_OF_A_PHASE):
                phase, began = self._phase
                self.add(DRIVER, Taken([TraceSpan("phase", phase, began, now - began, 0)], 0))
            self._phase = (event.phase, now) if isinstance(event, events.PhaseStarted) else None
            listener(event)

        return listen

    def close(self) -> None:
        """End the file. Safe to call twice."""
        if self._file.closed:
            return
        self.add(DRIVER, tracing.take())
        end = {"name": "dropped", "ph": "M", "pid": 0, "args": {"events": self.dropped}}
        # The last one has no comma behind it.
        self._file.write(json.dumps(end) + "\n]\n")
        self._file.close()

    def _answer(self, group: str, handle: SpansHandle) -> None:
        try:
            recorded = handle.wait(_LAST_WORDS_SECONDS)
        except RLinfError:
            return
        for rank, spans in enumerate(recorded):
            self.add(f"{group}:{rank}", spans)

    def _events(self, process: str, span: TraceSpan) -> Iterator[Mapping[str, Any]]:
        """Return a span as trace events; before the first one of a process or thread, what that is called."""
        number = self._numbers.get(process)
        if number is None:
            number = self._numbers[process] = len(self._numbers)
            yield {"name": "process_name", "ph": "M", "pid": number, "args": {"name": process}}
            yield {"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}}
        start, microseconds = span.began * 1e6, span.seconds * 1e6
        event = {"name": span.name, "cat": span.kind, "pid": number}
        if span.kind == tracing.TRANSFER:
            # These overlap, so they are on rows of their own.
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
        self._file.write(json.dumps(event, separators=(",", ":")) + ",\n")
