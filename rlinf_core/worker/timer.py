"""Timers: durations of parts of a method, by tag, separately for each call.

    with timer("train_step"):
        ...

    @timer("train_step")
    def train_step(self, batch): ...

A context variable assigns durations to the current call, so overlapping calls in one process do not mix; threads and
tasks inherit it if they copy the context, as `asyncio` does. Outside of a call, they are not collected.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

from rlinf_core.process import activity, pacing
from rlinf_core.suggest import as_index, quoted, short_repr

if TYPE_CHECKING:
    import socket

P = ParamSpec("P")
R = TypeVar("R")

Reduction: TypeAlias = Literal["max", "min", "mean", "sum"]

_recording: ContextVar[dict[str, float] | None] = ContextVar("rlinf_durations", default=None)


@contextmanager
def recording() -> Generator[dict[str, float], None, None]:
    """Collect the durations of one call: seconds by tag, filled within the block.

    Repeated tags add up. A nested call has its own collector.
    """
    durations: dict[str, float] = {}
    token = _recording.set(durations)
    try:
        yield durations
    finally:
        _recording.reset(token)


class timer:  # noqa: N801 - used like a function: `with timer(tag)`, `@timer(tag)`
    """A timer of a block, or as a decorator of every call of a function, method or coroutine function.

    Nested timers each count their full time. A block that raises counts, too.

    Args:
        tag: the name of the duration; by default the name of the decorated or enclosing function.
        rows: the size of the work, such as environments or tokens, by which durations are also kept (`call_records`).

    Raises:
        TypeError: `tag` is not text, as the function in `@Worker.timer` without a call.
        ValueError: `rows` is not an integer >= 0.
    """

    __slots__ = ("_began", "_holder", "_named", "rows", "tag")

    def __init__(self, tag: str | None = None, rows: int = 0) -> None:
        if tag is not None and not isinstance(tag, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise TypeError(f'the tag of a timer is text, as in `@Worker.timer("step")`, not {short_repr(tag)}')
        number = as_index(rows)
        if number is None or number < 0:
            raise ValueError(f"`rows` of a timer is {short_repr(rows)}, expected an integer >= 0")
        self.rows = number
        self._named = tag is not None
        self.tag = tag if tag is not None else caller_of(inspect.currentframe())
        # Of each unfinished use, as one timer may time nested blocks.
        self._began: list[float] = []
        self._holder: socket.socket | None = None

    def __enter__(self) -> None:
        if pacing.active is not None:
            self._holder = pacing.active.begin(self.tag)
        self._began.append(time.perf_counter())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        began = self._began.pop()
        if pacing.active is not None:
            pacing.active.end(self.tag, self.rows, began, self._holder)
        ended = time.perf_counter()
        _add(self.tag, ended - began)
        add_call(self.tag, self.rows, ended - began)
        if activity.recorder is not None:
            activity.recorder.add(activity.TIMER, self.tag, began, ended)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function`, timed.

        Raises:
            TypeError: it is a generator function, or, when called, another function that returns a coroutine: their
                calls only make the object that does the work.
        """
        tag = self.tag if self._named else getattr(function, "__name__", self.tag)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"`{function.__qualname__}` is a generator: time the loop that consumes it, as a block")
        if inspect.iscoroutinefunction(function):
            coroutine = cast("Callable[P, Awaitable[object]]", function)

            @functools.wraps(function)
            async def timed_coroutine(*args: P.args, **kwargs: P.kwargs) -> object:
                with timer(tag, self.rows):
                    return await coroutine(*args, **kwargs)

            return cast("Callable[P, R]", timed_coroutine)

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with timer(tag, self.rows):
                result = function(*args, **kwargs)
                if inspect.iscoroutine(result):
                    result.close()
                    name = getattr(function, "__qualname__", tag)
                    raise TypeError(f"`{name}` returned a coroutine: put the timer on the `async def` itself")
                return result

        return timed


def caller_of(frame: FrameType | None) -> str:
    """Return the name of the caller of a frame's function."""
    return frame.f_back.f_code.co_name if frame is not None and frame.f_back is not None else "block"


def _add(tag: str, seconds: float) -> None:
    durations = _recording.get()
    if durations is not None:
        durations[tag] = durations.get(tag, 0.0) + seconds


def reduce_durations(by_rank: Sequence[Mapping[str, float]], reduction: Reduction = "max") -> dict[str, float]:
    """Return one duration for each tag over the ranks that have it, in the order in which tags first appear.

    Args:
        by_rank: the durations of each rank, in seconds.
        reduction: how the durations of one tag are combined; `mean` is over the ranks that have the tag.

    Raises:
        ValueError: the reduction is unknown.
    """
    reduce = _REDUCTIONS.get(reduction)
    if reduce is None:
        names = quoted(_REDUCTIONS)
        raise ValueError(f"`{reduction}` is not a reduction of durations, expected one of {names}")
    tags = dict.fromkeys(tag for durations in by_rank for tag in durations)
    return {tag: reduce([durations[tag] for durations in by_rank if tag in durations]) for tag in tags}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


_REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {"max": max, "min": min, "mean": _mean, "sum": sum}


# Durations of the timed calls of this process, by tag and rows, from which a run's `profile.json` is made.


# The number of newest calls whose durations are kept for each tag and size.
_KEPT: Final = 64
# Sizes below this are distinguished exactly; larger ones by their two leading digits.
_EXACT: Final = 100
# The most pairs of tag and size that are kept; calls of further pairs are not recorded.
_MOST_KEYS: Final = 400


class CallRecord(NamedTuple):
    """The calls of one tag with about the same number of rows.

    Attributes:
        rows: the average rows of a call; 0 if it has none.
        calls: the number of calls.
        seconds: the sum of their durations.
        newest: the durations of the newest of them, in seconds.
    """

    tag: str
    rows: float
    calls: int
    seconds: float
    newest: tuple[float, ...]


class _Calls:
    __slots__ = ("calls", "newest", "rows", "seconds")

    def __init__(self) -> None:
        self.calls, self.rows, self.seconds = 0, 0.0, 0.0
        self.newest: deque[float] = deque(maxlen=_KEPT)


_calls: dict[tuple[str, int], _Calls] = {}


def size_of(rows: int) -> int:
    """Return the size under which calls with that many rows are recorded."""
    if rows < _EXACT:
        return rows
    unit = 10 ** (len(str(rows)) - 2)
    return rows // unit * unit


def forget_calls() -> None:
    """Forget all recorded calls, for example those of an earlier run in this process."""
    _calls.clear()


def add_call(tag: str, rows: int, seconds: float) -> None:
    """Record a call of that duration."""
    size = size_of(rows)
    kept = _calls.get((tag, size))
    if kept is None:
        if len(_calls) >= _MOST_KEYS:
            return
        kept = _calls.setdefault((tag, size), _Calls())
    kept.calls += 1
    kept.rows += rows
    kept.seconds += seconds
    kept.newest.append(seconds)


def call_records() -> list[CallRecord]:
    """Return the recorded calls of this process so far."""
    return [
        CallRecord(tag, kept.rows / kept.calls, kept.calls, kept.seconds, tuple(kept.newest))
        for (tag, _), kept in list(_calls.items())
        if kept.calls
    ]
