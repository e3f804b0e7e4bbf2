"""Decisions of a run's recovery: restarts after deaths, snapshots, and items that cause deaths."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Generic, NamedTuple, TypeVar, cast

from rlinf_core.config.sections.runner import RestartLimit
from rlinf_core.errors import RLinfError, WorkerDiedError
from rlinf_core.failures import WorkerGroupError, is_consequence, text_of

_ALL: Final = ""


class NodesReturned(Exception):  # noqa: N818 - not a failure: the run continues with these nodes
    """A signal that nodes without which elastic components run have joined again; the state of the run is saved."""


class Restart(NamedTuple):
    """An allowed restart: its number among the restarts that count, from 1, of the allowed number `of`."""

    number: int
    of: int


class Restarts:
    """The restarts of a run so far.

    Args:
        limit: `runner.max_restarts`.
        clock: returns monotonic seconds.
    """

    def __init__(self, limit: RestartLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._times: dict[str, list[float]] = {}

    def allow(self, component: str) -> Restart | None:
        """Count and return a restart after the death of a worker of `component`; None if beyond the limit."""
        times = self._counted(component)
        if len(times) >= self._limit.max:
            return None
        self._times[self._key(component)] = [*times, self._clock()]
        return Restart(len(times) + 1, self._limit.max)

    def remain(self, component: str) -> bool:
        """Return whether `allow` would allow a restart."""
        return len(self._counted(component)) < self._limit.max

    def _key(self, component: str) -> str:
        return _ALL if self._limit.seconds is None else component

    def _counted(self, component: str) -> list[float]:
        """Return the times of the restarts that count now."""
        seconds, now = self._limit.seconds, self._clock()
        return [at for at in self._times.get(self._key(component), []) if seconds is None or now - at < seconds]


def death(error: WorkerGroupError | WorkerDiedError) -> WorkerDiedError | None:
    """Return the death that is the root cause of a failure, or None."""
    first: BaseException = error.__cause__ if isinstance(error.__cause__, WorkerGroupError) else error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first if isinstance(first, WorkerDiedError) else None


def all_deaths(error: BaseException | None) -> dict[str, WorkerDiedError]:
    """Return the deaths that a failure and its cause report, by the address of the dead process."""
    if error is None:
        return {}
    deaths = all_deaths(error.__cause__)
    if isinstance(error, WorkerDiedError):
        deaths.setdefault(error.address, error)
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            deaths = {**all_deaths(inner), **deaths}
    return deaths


# The least pause between snapshots, as a multiple of the time that the last one took.
_REST: Final = 100.0


class SnapshotSchedule:
    """The moments of a run's snapshots: checkpoints by time, each of which the next one replaces.

    Snapshots bound the loss from the death of an actor. Saving them takes at most 1 % of the time, however long one
    takes.

    Args:
        seconds: the least seconds between two snapshots; None for no snapshots.
        clock: returns monotonic seconds.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._next = clock() + (seconds or 0.0)

    @property
    def due(self) -> bool:
        """Whether the state should be saved after this step."""
        return self._seconds is not None and self._clock() >= self._next

    @contextmanager
    def saving(self) -> Generator[None, None, None]:
        """Measure the time of saving the state, within the block, and set the time of the next snapshot."""
        began = self._clock()
        yield
        ended = self._clock()
        self._next = ended + max(self._seconds or 0.0, _REST * (ended - began))

    def stop(self) -> None:
        """Stop further snapshots."""
        self._seconds = None


T = TypeVar("T")
# The number of deaths of processes with an item after which it is tried alone.
SUSPECTED: Final = 2


class Suspects(Generic[T]):
    """The deaths of each item's processes so far.

    A process that handles many items at once does not report which of them causes its death. So all items with two
    deaths are suspected, and each is tried alone; a further death of a process that has only one item is due to that
    item. If the process reports which item it handled, its third death is enough.
    """

    def __init__(self) -> None:
        self._deaths: dict[str, list[str]] = {}
        self._items: dict[str, T] = {}
        self._set_aside: set[str] = set()

    @property
    def set_aside(self) -> frozenset[str]:
        """The names of the items that are no longer processed."""
        return frozenset(self._set_aside)

    def died_of(self, items: Mapping[str, T], reason: str) -> None:
        """Record the death of a process that had these items, by their names."""
        for name, item in items.items():
            if name not in self._set_aside:
                self._deaths.setdefault(name, []).append(reason)
                self._items[name] = item

    def due(self) -> dict[str, T]:
        """Return the items that should be tried alone, by their names."""
        return {name: self._items[name] for name, deaths in self._deaths.items() if len(deaths) >= SUSPECTED}

    def died_of_one(self, name: str, item: T, reason: str) -> list[str]:
        """Record the death of a process that is known to be caused by one item.

        Returns:
            The reasons of all deaths with the item if it is quarantined now, else an empty list.
        """
        if name in self._set_aside:
            return []
        if len(self._deaths.get(name, ())) >= SUSPECTED:
            return self.killed(name, reason)
        self.died_of({name: item}, reason)
        return []

    def lived(self, name: str) -> None:
        """Forget the deaths with an item: a process had only this item, and lives."""
        self._forget(name)

    def killed(self, name: str, reason: str) -> list[str]:
        """Quarantine an item that caused the death of a process; return the reasons of all deaths with it."""
        deaths = [*self._deaths.get(name, ()), reason]
        self._set_aside.add(name)
        self._forget(name)
        return deaths

    def _forget(self, name: str) -> None:
        self._deaths.pop(name, None)
        self._items.pop(name, None)


# The failures in a job's error, root causes first, each with its process, place and line of code.


_MOST_TEXT = 12
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
# Folders of installed packages and of the interpreter: a frame of the user's code is more useful.
_INSTALLED = re.compile(r"/(site-packages|lib/python3\.\d+)/")


class Failure(NamedTuple):
    """One failure of a worker, the driver, or a process whose death the driver saw.

    Attributes:
        error: the exception.
        consequence: whether another failure caused it.
        group, rank: the worker, or None and None for the driver.
        method: the called method.
        place: a description of where it ran, or None.
    """

    error: BaseException
    consequence: bool = False
    group: str | None = None
    rank: int | None = None
    method: str | None = None
    place: str | None = None

    @property
    def name(self) -> str:
        """The name of the process: `rollout:1`, the process whose death the driver saw, or `the driver`."""
        if self.group is not None:
            return f"{self.group}:{self.rank}"
        return self.error.address if isinstance(self.error, WorkerDiedError) else "the driver"


def failures_of(error: BaseException) -> list[Failure]:
    """Return all failures in an exception, root causes before consequences."""
    failures = list(_flat(error))
    return sorted([*_unlisted_deaths(failures), *failures], key=lambda failure: failure.consequence)


def reason_of(error: BaseException) -> str:
    """Return the first failure in one line, for the run's record."""
    return headline(failures_of(error)[0]).splitlines()[0]


def _unlisted_deaths(failures: list[Failure]) -> list[Failure]:
    """Return the deaths behind workers' failures that are no failures of calls, such as that of a channel's process.

    The failures of these workers become consequences.
    """
    known = {failure.name for failure in failures}
    deaths: dict[str, Failure] = {}
    for index, failure in enumerate(failures):
        error = failure.error
        if isinstance(error, WorkerDiedError) and error.address not in known:
            deaths.setdefault(error.address, Failure(error))
            failures[index] = failure._replace(consequence=True)
    return list(deaths.values())


def _flat(error: BaseException) -> Iterator[Failure]:
    if isinstance(error.__cause__, WorkerGroupError):
        yield from _flat(error.__cause__)
    if isinstance(error, WorkerGroupError):
        for rank, exception in zip(error.ranks, error.exceptions, strict=True):
            place = error.places.get(rank)
            consequence = is_consequence(error.group, rank, exception)
            yield Failure(exception, consequence, error.group, rank, error.method, place)
    elif isinstance(error, BaseExceptionGroup):
        for exception in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _flat(exception)
    else:
        yield Failure(error)


def headline(failure: Failure) -> str:
    """Return a description of a failure, such as `` `env:0` failed in `step`: ValueError: no camera ``."""
    error = failure.error
    text = error.message if isinstance(error, RLinfError) and error.message else text_of(error)
    lines = text.splitlines()
    if len(lines) > _MOST_TEXT:
        text = "\n".join([*lines[:_MOST_TEXT], f"... {len(lines) - _MOST_TEXT} more lines"])
    if failure.group is None:
        return text if text and isinstance(error, RLinfError) else f"the driver failed: {_named(error, text)}"
    called = "in its constructor" if failure.method == "__init__" else f"in `{failure.method}`"
    if isinstance(error, WorkerDiedError) and error.address == failure.name:
        return f"`{failure.name}` died {called}"
    message = text if isinstance(error, RLinfError) else _named(error, text)
    return f"`{failure.name}` failed {called}: {message}"


def _named(error: BaseException, text: str) -> str:
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"{name}: {text}" if text else name


def position(error: BaseException) -> str | None:
    """Return `FILE:LINE in FUNCTION` of the raising frame, of user code if possible; None for an error of rlinf."""
    if isinstance(error, RLinfError):
        return None
    notes: Sequence[str] = getattr(error, "__notes__", ())
    frames = [match for note in notes if note.startswith("raised in ") for match in _FRAME.finditer(note)]
    if frames:
        own = [frame for frame in frames if not _INSTALLED.search(frame["file"])]
        last = (own or frames)[-1]
        return f"{last['file']}:{last['line']} in {last['function']}"
    import traceback

    steps = traceback.extract_tb(error.__traceback__)
    own_steps = [step for step in steps if not _INSTALLED.search(step.filename)] or list(steps)
    return f"{own_steps[-1].filename}:{own_steps[-1].lineno} in {own_steps[-1].name}" if own_steps else None
