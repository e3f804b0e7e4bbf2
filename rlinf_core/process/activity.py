"""The activity of this process: its pending operations, by thread and asyncio task, and what else it holds, for other
processes; and spans of time, recorded while its run is traced.

    activity.start()
    ...
    taken = activity.take()

Without tracing, the only cost is the check whether there is a `recorder`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias, cast

from rlinf_core.waiting import RUNNING, Operation, OperationKind, Publication

# The kinds of spans: a timer of the code, a method of a worker, a wait of a thread, and a transfer between two
# processes, waited for or not.
TIMER: Final = "timer"
METHOD: Final = "method"
WAIT: Final = "wait"
TRANSFER: Final = "transfer"

# The most spans kept between two collections, about 20 MB; further ones are only counted.
LIMIT: Final = 100_000


class TraceSpan(NamedTuple):
    """One timed activity.

    Attributes:
        kind: one of the kinds above.
        name: its label, for example `send to actor:0`.
        began: its beginning, in seconds since 1970 by the clock of its host.
        task_key: its thread or task; spans with the same task_key are nested or disjoint, except transfers.
    """

    kind: str
    name: str
    began: float
    seconds: float
    task_key: int


class Taken(NamedTuple):
    """The spans of one process since the last request, ordered by end, and the number of those dropped."""

    spans: list[TraceSpan]
    dropped: int


class SpanRecorder:
    """A recorder that keeps spans until they are taken. Any thread may add spans."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._spans: list[TraceSpan] = []
        self._dropped = 0
        # Operations are timed by the monotonic clock; only the time of day is comparable between hosts.
        self._epoch = time.time() - time.monotonic()

    def add(self, kind: str, name: str, began: float, ended: float, task_key: Hashable = None) -> None:
        """Record a finished span.

        Args:
            began, ended: the times by `time.monotonic` or `time.perf_counter`, which are the same clock on Linux.
            task_key: the ident of the thread, or the task, that it blocked; by default the calling one.
        """
        spans = self._spans
        if len(spans) >= self._limit:
            self._dropped += 1
            return
        owner = _own_strand() if task_key is None else task_key
        number = owner if isinstance(owner, int) else id(owner)
        spans.append(TraceSpan(kind, name, self._epoch + began, ended - began, number))

    def take(self) -> Taken:
        """Return the spans since the last call."""
        # A span that another thread is just adding to the old list may be lost.
        spans, self._spans = self._spans, []
        dropped, self._dropped = self._dropped, 0
        return Taken(spans, dropped)


# The recorder of this process; None while the run is not traced.
recorder: SpanRecorder | None = None


def start() -> None:
    """Record from now on. Idempotent."""
    global recorder
    if recorder is None:
        recorder = SpanRecorder()


def stop() -> None:
    """Stop recording and drop spans that were not collected."""
    global recorder
    recorder = None


def take() -> Taken:
    """Return the spans since the last call; none if tracing is off."""
    return recorder.take() if recorder is not None else Taken([], 0)


def _own_strand() -> Hashable:
    """Return the running task, else the thread."""
    try:
        return asyncio.current_task() or threading.get_ident()
    except RuntimeError:
        return threading.get_ident()


# Seconds for which a process counts as moving after its last bytes moved: networks may stall for seconds.
_STILL_MOVING = 5.0
# The finished operations kept as evidence of a failure: their most, and their greatest age in seconds when reported.
_RECENT = 256
_RECENT_SECONDS = 30.0

# Kind, target, key, since, detached, peers, task_key, bounded.
_Entry: TypeAlias = tuple[OperationKind, str, str | None, float, bool, tuple[str, ...], Hashable, bool]


class InflightOps:
    """The pending operations of this process, recorded cheaply enough to be always on.

    Any thread may write or read without a lock: every change is one dictionary operation, and an `Operation` is made
    only on request. `has_main`: whether the process runs code outside of methods, as a driver does.
    """

    def __init__(self, *, has_main: bool = False) -> None:
        self._has_main = has_main
        self._serials = itertools.count(1)
        self._current: dict[int, _Entry] = {}
        # By serial of a detached operation that is waited for: the waiting thread or task, and whether it is bounded.
        self._attached: dict[int, tuple[Hashable, bool]] = {}
        # By thread that has been in an operation: whether the user started it.
        self._threads: dict[int, bool] = {}
        self._changes = 0
        self._moved_at = float("-inf")
        self._quiet_since = time.monotonic()
        self._last_call = ""
        # The finished operations, each with the time at which it ended.
        self._recent: deque[tuple[_Entry, float]] = deque(maxlen=_RECENT)

    def begin(
        self,
        kind: OperationKind,
        target: str,
        key: str | None = None,
        *,
        detached: bool = False,
        peers: tuple[str, ...] = (),
        task_key: Hashable = None,
        bounded: bool = False,
    ) -> int:
        """Publish that an operation begins, and return its serial for `end`.

        Args:
            kind, target, key, detached, peers, bounded: see `Operation`.
            task_key: the thread or task that it blocks; by default the calling thread. Asynchronous code gives its
                task, and threads of the runtime give anything but None.
        """
        serial = next(self._serials)
        if task_key is None:
            task_key = self._thread(kind)
        self._current[serial] = (kind, target, key, time.monotonic(), detached, peers, task_key, bounded)
        self._changes += 1
        return serial

    def _thread(self, kind: OperationKind) -> int:
        task_key = threading.get_ident()
        if task_key not in self._threads:
            self._threads[task_key] = kind not in RUNNING and not _is_ours()
        return task_key

    def publish_past(self, kind: OperationKind) -> None:
        """Publish a finished operation of the calling thread that was too short to be recorded."""
        self._thread(kind)
        self._changes += 1
        if not self._current:
            self._quiet_since = time.monotonic()

    def attach(self, serial: int, task_key: Hashable = None, *, bounded: bool = False) -> None:
        """Publish that the calling thread, or the task `task_key`, now waits for an operation begun as detached."""
        # Kept apart from the entry: writing the entry could restore an operation that another thread ends meanwhile.
        self._attached[serial] = (threading.get_ident() if task_key is None else task_key, bounded)
        self._changes += 1

    def detach(self, serial: int) -> None:
        """Publish that a thread no longer waits for a pending operation, for example after a timeout."""
        self._attached.pop(serial, None)
        self._changes += 1

    def end(self, serial: int) -> None:
        """Publish that an operation has ended, with success or not. Idempotent."""
        entry = self._current.pop(serial, None)
        if entry is not None:
            self._recent.append((entry, time.monotonic()))
            if recorder is not None and not entry[4]:
                _record(recorder, entry)
        if self._attached:
            self._attached.pop(serial, None)
        self._changes += 1
        if not self._current:
            self._quiet_since = time.monotonic()

    def returned(self, method: str, failure: str | None) -> None:
        """Publish the outcome of a method call; `failure` is its exception, for example `ValueError: no camera`."""
        self._last_call = f"its `{method}` raised {failure}" if failure is not None else f"its `{method}` returned"

    def task_key(self, serial: int) -> Hashable:
        """Return the thread or task blocked by an operation; None once it has ended."""
        attached, entry = self._attached.get(serial), self._current.get(serial)
        return None if entry is None else entry[6] if attached is None else attached[0]

    def moved(self) -> None:
        """Publish progress of a large message: its operation is slow, not stuck."""
        self._moved_at = time.monotonic()

    @contextmanager
    def during(
        self, kind: OperationKind, target: str, *, peers: tuple[str, ...] = (), task_key: Hashable = None
    ) -> Generator[None, None, None]:
        """Publish an operation for as long as the block lasts."""
        serial = self.begin(kind, target, peers=peers, task_key=task_key)
        try:
            yield
        finally:
            self.end(serial)

    def recent(self) -> str:
        """Return the operations that ended in the last 30 s, one line each, the latest last."""
        now = time.monotonic()
        return "\n".join(
            f"{now - ended:7.3f} s ago, after {ended - since:.3f} s: {Operation(kind, target, key, 0.0, 0).title}"
            for (kind, target, key, since, *_), ended in self._recent.copy()
            if now - ended <= _RECENT_SECONDS
        )

    def publication(self) -> Publication:
        """Return the current report for other processes."""
        now = time.monotonic()
        if now - self._moved_at < _STILL_MOVING:
            self._changes += 1
        # dict.copy is atomic for the interpreter, so no writer can interfere.
        current = sorted(self._current.copy().items())
        attached = self._attached.copy()
        operations: list[Operation] = []
        held_up: set[Hashable] = set()
        for serial, (kind, target, key, since, detached, peers, task_key, bounded) in current:
            in_background = detached and serial not in attached
            if serial in attached:
                task_key, bounded = attached[serial]
            operations.append(Operation(kind, target, key, now - since, serial, in_background, peers, bounded))
            if not in_background and kind not in RUNNING:
                held_up.add(task_key)
        for serial in attached:
            if serial not in self._current:
                # It ended while it was being attached.
                self._attached.pop(serial, None)
        held_up |= _held_up_threads(held_up)
        running = not all(_is_held_up(task_key, held_up) for task_key in self._task_keys(entry for _, entry in current))
        quiet = 0.0 if current else now - self._quiet_since
        return Publication(tuple(operations), self._changes, running, quiet, self._last_call)

    def _task_keys(self, entries: Iterable[_Entry]) -> set[Hashable]:
        """Return the threads and tasks that may run user code: running methods, a driver's main thread, users' threads.

        A user's thread counts as long as it lives. The threads that run methods, and a worker's main thread, count only
        during methods: outside of them they wait for calls.
        """
        task_keys: set[Hashable] = {entry[6] for entry in entries if entry[0] is OperationKind.METHOD}
        alive = {thread.ident for thread in threading.enumerate()}
        main = threading.main_thread().ident
        for thread, users in self._threads.copy().items():
            if thread not in alive:
                self._threads.pop(thread, None)
            elif users and thread != main:
                task_keys.add(thread)
        return task_keys | {main} if self._has_main else task_keys


def _record(recorder: SpanRecorder, entry: _Entry) -> None:
    """Record a finished operation for the trace."""
    kind, target, key, since, _, _, task_key, _ = entry
    ended = time.monotonic()
    if kind is OperationKind.METHOD:
        recorder.add(METHOD, target, since, ended, task_key)
    else:
        recorder.add(WAIT, Operation(kind, target, key, 0.0, 0).title, since, ended, task_key)


def _held_up_threads(held_up: set[Hashable]) -> set[Hashable]:
    """Return the threads whose event loop holds only blocked tasks, or tasks that await blocked ones."""
    others = [task_key for task_key in held_up if not isinstance(task_key, int)]
    if not others:
        return set()
    import asyncio

    threads: set[Hashable] = set()
    for loop in {cast("asyncio.Task[object]", task).get_loop() for task in others if isinstance(task, asyncio.Task)}:
        try:
            tasks = asyncio.all_tasks(loop)
        except RuntimeError:
            continue  # tasks come and go too fast to be listed, so the loop runs
        if tasks and all(_is_held_up(task, held_up) for task in tasks):
            threads.add(getattr(loop, "_thread_id", None))
    return threads


def _is_held_up(awaited: object, held_up: set[Hashable]) -> bool:
    """Return whether a task is blocked in an operation, or awaits only blocked tasks; a timer may still wake it."""
    if isinstance(awaited, Hashable) and awaited in held_up:
        return True
    inner = getattr(awaited, "_fut_waiter", None)
    if inner is not None:
        return _is_held_up(inner, held_up)
    children = [child for child in getattr(awaited, "_children", ()) if not child.done()]
    return bool(children) and all(_is_held_up(child, held_up) for child in children)


def current_task_key() -> Hashable:
    """Return what a wait of the running task blocks: the thread if it is the only task there, else the task.

    On a thread of the runtime, which runs the methods that are coroutines, it is always the task.
    """
    import asyncio

    if not _is_ours() and len(asyncio.all_tasks()) == 1:
        return threading.get_ident()
    return asyncio.current_task()


def _is_ours() -> bool:
    """Return whether the runtime started the calling thread, which may then wait for work without being stuck."""
    return threading.current_thread().name.startswith("rlinf-")


_MOST_LINES: Final = 9
_LONGEST: Final = 120
_holders: list[Callable[[], Sequence[str]]] = []


def show_holdings(holder: Callable[[], Sequence[str]]) -> None:
    """Register a function that returns a line for each resource of this process; it is called from another thread."""
    _holders.append(holder)


def holdings() -> tuple[str, ...]:
    """Return a line for each resource that this process holds; of more than 9, the first 9 and how many more."""
    lines = [line[:_LONGEST] for holder in tuple(_holders) for line in _said(holder)]
    rest = len(lines) - _MOST_LINES
    return (*lines[:_MOST_LINES], f"and {rest} more") if rest > 0 else tuple(lines)


def _said(holder: Callable[[], Sequence[str]]) -> Sequence[str]:
    try:
        return holder()
    except Exception as error:  # noqa: BLE001 - an error in a recipe's function must not hide the other lines
        return (f"what it holds is not known: {type(error).__name__}: {error}",)
