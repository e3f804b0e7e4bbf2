"""Durations of parts of a method, by tag, separately for each call.

    with timer("train_step"):
        ...

    @timer("train_step")
    def train_step(self, batch): ...

Durations are assigned to the current call by context variable, so overlapping calls in one process do not mix; threads
and tasks inherit it if they copy the context, as `asyncio` does. Outside of a call they are dropped.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeAlias, TypeVar, cast

from rlinf_core.process import pacing, tracing
from rlinf_core.worker.calls import add_call

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
        rows: the size of what is done, such as environments or tokens: durations are also kept by it (`call_record`).
    """

    __slots__ = ("_began", "_holder", "_named", "rows", "tag")

    def __init__(self, tag: str | None = None, rows: int = 0) -> None:
        self.rows = rows
        self._named = tag is not None
        self.tag = tag if tag is not None else caller_of(inspect.currentframe())
        self._began = 0.0
        self._holder: socket.socket | None = None

    def __enter__(self) -> None:
        if pacing.active is not None:
            self._holder = pacing.active.begin(self.tag)
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if pacing.active is not None:
            pacing.active.end(self.tag, self.rows, self._began, self._holder)
        ended = time.perf_counter()
        _add(self.tag, ended - self._began)
        add_call(self.tag, self.rows, ended - self._began)
        if tracing.recorder is not None:
            tracing.recorder.add(tracing.TIMER, self.tag, self._began, ended)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function`, timed."""
        tag = self.tag if self._named else getattr(function, "__name__", self.tag)
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
                return function(*args, **kwargs)

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
        ValueError: there is no such reduction.
    """
    reduce = _REDUCTIONS.get(reduction)
    if reduce is None:
        names = ", ".join(f"`{name}`" for name in _REDUCTIONS)
        raise ValueError(f"`{reduction}` is not a reduction of durations, expected one of {names}")
    tags = dict.fromkeys(tag for durations in by_rank for tag in durations)
    return {tag: reduce([durations[tag] for durations in by_rank if tag in durations]) for tag in tags}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


_REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {"max": max, "min": min, "mean": _mean, "sum": sum}
