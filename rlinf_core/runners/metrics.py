"""The numbers of a run: its metrics, their services and statistics, and the durations of its processes' timed calls.

`metrics.jsonl` holds one JSON object per step; NaN is written as null, since JSON has no NaN:

    {"step": 12, "time": 1773482102.5, "metrics": {"env/return": 3.2, "train/actor/grad_norm": null}}

`profile.json` holds the durations, by rows.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Self, cast

from pydantic import Field

from rlinf_core.errors import RLinfError, RunError
from rlinf_core.foreign.files import NO_ROOM, FileModel, Moment, Step, open_below, read_model, write_fault
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.durable import RecordFile, parse_model
from rlinf_core.suggest import encodable, excerpt
from rlinf_core.worker.timer import CallRecord, call_records, size_of

if TYPE_CHECKING:
    from rlinf_core.runners.exporters import MetricsBackend


# The 97.5 % quantile of the normal distribution, for 95 % intervals.
_Z = 1.959963984540054


def mean(values: Sequence[float]) -> float:
    """Return the mean, or 0 for no values."""
    return sum(values) / len(values) if values else 0.0


def wilson_interval(right: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of the share `right / count` (Wilson, JASA 22, 1927); (0, 1) for no trials.

    A trial may count as a fraction in `right`: fractions vary no more than outcomes of 0 and 1 with the same mean.
    """
    if not count:
        return 0.0, 1.0
    share, square = right / count, _Z * _Z / count
    center = (share + square / 2) / (1 + square)
    half = _Z * sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, center - half), min(1.0, center + half)


# The component that records sizes known only to the loop, such as lengths of answers.
DRIVER: Final = "driver"
# The number of evenly spaced quantiles of the durations, from the smallest to the largest, that are kept.
_QUANTILES: Final = 21


_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CallsOfSize(FileModel):
    """The calls of one tag with about the same number of rows, over all processes of a component.

    Attributes:
        phase: the tag.
        processes: the number of processes that had such calls.
        rows: the average rows of a call; 0 if it has none.
        calls, seconds: the number of calls, and the sum of their durations.
        quantiles: evenly spaced quantiles of the durations, from the smallest to the largest; empty without durations.
    """

    component: str
    phase: str
    processes: Annotated[int, Field(ge=1)]
    rows: _Amount
    calls: Annotated[int, Field(ge=1)]
    seconds: _Amount
    quantiles: list[_Amount]


class RunProfile(FileModel):
    """The content of `profile.json`.

    Attributes:
        rows: the calls, by component, tag and size.
        load, cpus: the load average of the driver's machine at the end, and the number of its processors.
    """

    rows: list[CallsOfSize]
    load: float = 0.0
    cpus: int = 1


def read_profile(file: Path) -> RunProfile:
    """Return the profile that a run wrote.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    return read_model(file, RunProfile)


def write_profile(file: Path, components: Mapping[str, Sequence[Sequence[CallRecord]]]) -> None:
    """Write the calls of all processes, including the driver.

    Args:
        file: the file.
        components: the calls of each process that has answered, by component.

    Raises:
        OSError: the file cannot be written.
    """
    rows = [row for name, ranks in components.items() for row in _rows(name, ranks)]
    rows += _rows(DRIVER, [call_records()])
    record = {"schema": "rlinf.profile/1", "cpus": os.cpu_count() or 1, "load": os.getloadavg()[0], "rows": rows}
    lines = json.dumps(record).replace('{"component"', '\n  {"component"')
    durable.write_whole(file, lines + "\n")


def _rows(component: str, ranks: Sequence[Sequence[CallRecord]]) -> list[dict[str, Any]]:
    """Return one row for each tag and size, over all ranks."""
    merged: dict[tuple[str, int], list[CallRecord]] = {}
    for calls in ranks:
        for call in calls:
            merged.setdefault((call.tag, size_of(int(call.rows))), []).append(call)
    rows: list[dict[str, Any]] = []
    for (tag, _), calls in merged.items():
        number = sum(call.calls for call in calls)
        rows.append(
            {
                "component": component,
                "phase": tag,
                "processes": len(calls),
                "rows": round(sum(call.rows * call.calls for call in calls) / number, 2),
                "calls": number,
                "seconds": _rounded(sum(call.seconds for call in calls)),
                "slowest": _rounded(max(call.seconds for call in calls)),
                "quantiles": _quantiles([seconds for call in calls for seconds in call.newest]),
            }
        )
    return rows


def _quantiles(durations: Sequence[float]) -> list[float]:
    ordered = sorted(durations)
    if not ordered or not ordered[-1]:
        return []
    last = len(ordered) - 1
    return [_rounded(ordered[round(number * last / (_QUANTILES - 1))]) for number in range(_QUANTILES)]


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


LOGGER = logging.getLogger("rlinf")
# The metric of the seconds that an evaluation took.
EVALUATION_TIME: Final = "time/evaluate"
# The most lines, one per step, that are kept while the file system has no room for them.
_MOST_UNWRITTEN: Final = 10_000
# What each line of the file and each record of `load_run` has beside metrics.
_OF_EACH_LINE: Final = ("step", "time")
_RETURN: Final = 'return a number for each name, as in `{"env/return": 17.2}`'


class Metrics(NamedTuple):
    """The metrics of one step: numbers by name, possibly NaN, and the `time` of writing in seconds since 1970."""

    step: int
    time: float
    metrics: Mapping[str, float]


class _Line(FileModel):
    step: Step
    time: Moment
    metrics: dict[str, float | None]


class MetricsWriter:
    """A writer that appends the metrics of each step. A run has one.

    When `log` returns, the line is in the file; a torn last line of an earlier process is cut off. While the file
    system has no room, lines are kept in memory and written with the next one, so that the run continues.

    Args:
        path: the file; existing lines are kept.
        backends: the services from `open_backends`, which are closed with this writer.

    Raises:
        RunError: the file cannot be written.
    """

    def __init__(self, path: Path, backends: Sequence[MetricsBackend] = ()) -> None:
        self.path = path
        self._backends = tuple(backends)
        # The last line, written or not.
        self._last: Metrics | None = None
        # The newest lines, which are not in the file yet, and the offset at which they, or the last line, begin.
        self._unwritten: deque[Metrics] = deque(maxlen=_MOST_UNWRITTEN)
        self._start = 0
        self._warned = False
        with self._guarded():
            descriptor = open_below(path.parent, path.name, os.O_RDWR | os.O_CREAT)
            self._file = os.fdopen(descriptor, "r+b", buffering=0)
            self._keep_until(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def newest_up_to(self, step: int) -> Mapping[str, float]:
        """Return the newest value of every metric up to `step`, from this and earlier processes."""
        newest: dict[str, float] = {}
        for line in (*metrics_in(self.path), *self._unwritten):
            if line.step <= step:
                newest.update(line.metrics)
        return newest

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step`, numbers by name.

        Steps must be in order. Further metrics of the last step, for example of an evaluation after it, are merged into
        its line.

        Raises:
            ValueError: a later step was already written; use `rewind` to go back.
            RunError: the file cannot be written, or the writer is closed.
        """
        if self._file.closed:
            help = "make a new runner to train or evaluate again"
            raise RunError("the run has ended, and records no more metrics", where=str(self.path), help=help)
        numbers = {name: float(value) for name, value in metrics.items()}
        last = self._last
        if last is not None and step < last.step:
            raise ValueError(f"metrics of step {step} come after those of step {last.step}")
        if last is not None and step == last.step:
            line = last._replace(metrics={**last.metrics, **numbers})
            if self._unwritten:
                self._unwritten.pop()
        else:
            line = Metrics(step, time.time(), numbers)
            if not self._unwritten:
                with self._guarded():
                    self._start = self._file.seek(0, os.SEEK_END)
        self._unwritten.append(line)
        self._last = line
        self._write()
        self._forward(lambda backend: backend.log(step, numbers))

    def rewind(self, step: int) -> None:
        """Drop the metrics after `step`; the run continues from there.

        Raises:
            RunError: the file cannot be written.
        """
        kept = [line for line in self._unwritten if line.step <= step]
        with self._guarded():
            self._keep_until(step)
        if kept:
            self._unwritten.extend(kept)
            self._last = kept[-1]
            with self._guarded():
                self._start = self._file.seek(0, os.SEEK_END)
        self._forward(lambda backend: backend.rewind(step))

    def close(self) -> None:
        """Write the remaining lines, and close the backends. Idempotent."""
        if self._unwritten and not self._file.closed:
            with suppress(RunError):
                self._write()
        if self._unwritten:
            steps = f"{self._unwritten[0].step} to {self._unwritten[-1].step}"
            LOGGER.warning("the metrics of the steps %s are not in %s: it could not be written", steps, self.path)
            self._unwritten.clear()
        self._file.close()
        self._forward(lambda backend: backend.close())
        self._backends = ()

    def _forward(self, what: Callable[[MetricsBackend], None]) -> None:
        """Call `what` with each backend. A failing service is dropped, since it must not end the run."""
        kept: list[MetricsBackend] = []
        for backend in self._backends:
            try:
                what(backend)
                kept.append(backend)
            except Exception as error:  # noqa: BLE001 - a service may raise any error
                name = type(backend).__name__
                LOGGER.warning(
                    "%s gets no more metrics (%s: %s); all are in %s", name, type(error).__name__, error, self.path
                )
        self._backends = tuple(kept)

    def _keep_until(self, step: int | None) -> None:
        """Truncate the file after the last whole line with a step up to `step` (None: with any step)."""
        self._unwritten.clear()
        self._last, self._start = None, 0
        end = 0
        for start, stop, line in metrics_in(self.path).placed():
            if step is not None and line.step > step:
                break
            self._last, self._start, end = line, start, stop
        self._file.truncate(end)

    def _write(self) -> None:
        """Write the unwritten lines in one piece, so that a reader, or a successor after a kill, finds whole lines.

        Raises:
            RunError: the file cannot be written for a reason other than a lack of room.
        """
        text = b"".join(map(_encode, self._unwritten))
        with self._guarded():
            try:
                self._file.seek(self._start)
                done = 0
                while done < len(text):
                    # A nearly full file system may write only a part.
                    done += self._file.write(text[done:])
                self._file.truncate(self._start + len(text))
            except OSError as error:
                self._file.truncate(self._start)
                if error.errno not in NO_ROOM:
                    raise
                if not self._warned:
                    self._warned = True
                    why = write_fault(self.path, error)
                    LOGGER.warning("metrics cannot be written to %s, and are kept in memory: %s", self.path, why)
                return
        self._start += len(text) - len(_encode(self._unwritten[-1]))
        self._unwritten.clear()
        self._warned = False

    @contextmanager
    def _guarded(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                "metrics cannot be written",
                where=str(self.path),
                why=write_fault(self.path, error),
                help="free some space, or fix its permissions",
            ) from error


def numbers_of(metrics: object, source: str, taken: Collection[str] = ()) -> dict[str, float]:
    """Return the metrics that a loop's method returned as floats by name; a value may be a tensor of one element.

    Args:
        metrics: what it returned.
        source: the method, for errors.
        taken: names of the step's times, beside those of each line.

    Raises:
        RLinfError: it returned something else, or a metric with a name that is taken; the error names the metric.
    """
    if not isinstance(metrics, Mapping):
        raise RLinfError(f"`{source}` returned no metrics but {excerpt(repr(metrics))}", help=_RETURN)
    numbers: dict[str, float] = {}
    for name, value in cast("Mapping[Any, Any]", metrics).items():
        if name in (*_OF_EACH_LINE, *taken):
            message = f"`{source}` returned a metric `{name}`, which is the name of a number that each step has already"
            raise RLinfError(message, help=f"give it another name, such as `train/{name}`")
        try:
            if not isinstance(name, str) or isinstance(value, str | bytes):
                raise TypeError
            # A file name that is not UTF-8 would make the checkpoint's manifest and the line unreadable.
            numbers[encodable(name)] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            words = f"`{source}` returned {excerpt(repr(value))} as metric {excerpt(repr(name))}, which is not a number"
            raise RLinfError(words, help=_RETURN) from None
    return numbers


def metrics_in(path: Path) -> RecordFile[Metrics]:
    """Return the metrics in `path`, in order of their steps, with null as NaN."""
    return RecordFile(path, _parse)


def read_metrics(path: Path) -> list[Metrics]:
    """Return the metrics in `path`, one item per step in order; empty if there is no such file.

    Raises:
        OSError: the file exists but cannot be read.
    """
    return list(metrics_in(path))


def _encode(line: Metrics) -> bytes:
    metrics = {name: value if math.isfinite(value) else None for name, value in line.metrics.items()}
    return json.dumps({"step": line.step, "time": line.time, "metrics": metrics}).encode() + b"\n"


def decode(raw: bytes) -> Metrics | None:
    """Return the metrics of a line; None for a torn or invalid line."""
    try:
        return _parse(raw) if raw.endswith(b"\n") else None
    except ValueError:
        return None


def _parse(raw: bytes) -> Metrics:
    line = parse_model(raw, _Line)
    values = line.metrics
    if None in values.values():
        values = {name: math.nan if value is None else value for name, value in values.items()}
    return Metrics(line.step, line.time, cast("dict[str, float]", values))
