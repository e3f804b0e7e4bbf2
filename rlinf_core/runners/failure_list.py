"""The failures in a job's error, root causes first: the process, the place, the line of code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from rlinf_core.errors import RLinfError, WorkerDiedError
from rlinf_core.failures import WorkerGroupError, is_consequence

_MOST_TEXT = 12
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
# Folders of rlinf and of the interpreter: the user's own frame is more useful.
_INSTALLED = re.compile(r"/(site-packages|lib/python3\.\d+)/")


class Failure(NamedTuple):
    """One thing that failed.

    Attributes:
        error: what was raised.
        consequence: whether it was caused by another failure.
        group, rank: the worker, or None and None for the driver.
        method: the called method.
        place: where it ran, in words, or None.
    """

    error: BaseException
    consequence: bool = False
    group: str | None = None
    rank: int | None = None
    method: str | None = None
    place: str | None = None

    @property
    def name(self) -> str:
        """`rollout:1`, the process whose death the driver saw, or `the driver`."""
        if self.group is not None:
            return f"{self.group}:{self.rank}"
        return self.error.address if isinstance(self.error, WorkerDiedError) else "the driver"


def failures_of(error: BaseException) -> list[Failure]:
    """Return all failures in an exception, root causes before consequences."""
    failures = list(_flat(error))
    return sorted([*_unlisted_deaths(failures), *failures], key=lambda failure: failure.consequence)


def reason_of(error: BaseException) -> str:
    """Return the first failure in one line, for the run's own record."""
    return headline(failures_of(error)[0]).splitlines()[0]


def _unlisted_deaths(failures: list[Failure]) -> list[Failure]:
    """Return the deaths behind workers' failures that are not failed calls themselves, as of a channel's own process.

    Those workers' failures become consequences.
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
    """Return what failed, as in `` `env:0` failed in `step`: ValueError: no camera ``."""
    error = failure.error
    text = error.message if isinstance(error, RLinfError) and error.message else str(error)
    lines = text.splitlines()
    if len(lines) > _MOST_TEXT:
        text = "\n".join([*lines[:_MOST_TEXT], f"... {len(lines) - _MOST_TEXT} more lines"])
    if failure.group is None:
        return text if isinstance(error, RLinfError) else f"the driver failed: {_named(error, text)}"
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
    """Return `FILE:LINE in FUNCTION` of the raising frame, a user's frame where there is one."""
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
