"""The metrics of a run: `metrics.jsonl`, one JSON object for each step, and the services that a user names besides.

    {"step": 12, "time": 1773482102.5, "metrics": {"env/return": 3.2, "train/actor/grad_norm": null}}

A metric that is not a number is null, since JSON has no word for it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, Self

from pydantic import ValidationError

from rlinf_core.errors import RunError
from rlinf_core.foreign.file_models import FileModel, Moment, Step, first_fault
from rlinf_core.foreign.files import open_below, open_regular
from rlinf_core.runners.metric_backends import MetricsBackend

LOGGER = logging.getLogger("rlinf")
_LONGEST_LINE: Final = 16 << 20


class Metrics(NamedTuple):
    """The metrics of one step, written at `time` (seconds since 1970): numbers by name, nan where there was none."""

    step: int
    time: float
    metrics: Mapping[str, float]


class _Line(FileModel):
    step: Step
    time: Moment
    metrics: dict[str, float | None]


class MetricsWriter:
    """Appends the metrics of each step. A run has one.

    Each line has left the process when `log` returns; what an earlier process left torn at the end is cut off.

    Args:
        path: the file; lines that it has stay.
        backends: further places, as `open_backends` gives them. They are closed with this writer.

    Raises:
        RunError: the file cannot be written.
    """

    def __init__(self, path: Path, backends: Sequence[MetricsBackend] = ()) -> None:
        self.path = path
        self._backends = tuple(backends)
        # What the last line says, and where in the file it begins.
        self._last: Metrics | None = None
        self._last_start = 0
        with self._guarded():
            descriptor = open_below(path.parent, path.name, os.O_RDWR | os.O_CREAT)
            self._file = os.fdopen(descriptor, "r+b", buffering=0)
            self._keep_until(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def newest_up_to(self, step: int) -> Mapping[str, float]:
        """Return the newest value that every metric had after `step`, of this and of earlier processes."""
        newest: dict[str, float] = {}
        for line in read_metrics(self.path):
            if line.step <= step:
                newest.update(line.metrics)
        return newest

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step`, numbers by name.

        Steps come in order. Metrics of the step that came last, as those of an evaluation after it, join its line.

        Raises:
            ValueError: a later step was written already; `rewind` goes back.
            RunError: the file cannot be written.
        """
        numbers = {name: float(value) for name, value in metrics.items()}
        last = self._last
        if last is not None and step < last.step:
            raise ValueError(f"metrics of step {step} come after those of step {last.step}")
        if last is not None and step == last.step:
            line = last._replace(metrics={**last.metrics, **numbers})
        else:
            line = Metrics(step, time.time(), numbers)
            with self._guarded():
                self._last_start = self._file.seek(0, os.SEEK_END)
        text = _encode(line)
        with self._guarded():
            # One write, so that a reader, and whoever comes after a kill, finds a line or none.
            self._file.seek(self._last_start)
            self._file.write(text)
            self._file.truncate(self._last_start + len(text))
        self._last = line
        self._forward(lambda backend: backend.log(step, numbers))

    def rewind(self, step: int) -> None:
        """Drop what was written for steps after `step`: the run goes on from there.

        Raises:
            RunError: the file cannot be written.
        """
        with self._guarded():
            self._keep_until(step)
        self._forward(lambda backend: backend.rewind(step))

    def close(self) -> None:
        """Write out what backends hold back. Safe to call twice."""
        self._file.close()
        self._forward(lambda backend: backend.close())
        self._backends = ()

    def _forward(self, what: Callable[[MetricsBackend], None]) -> None:
        """Tell the backends. A service that fails is left out from then on: no run ends for its sake."""
        kept: list[MetricsBackend] = []
        for backend in self._backends:
            try:
                what(backend)
                kept.append(backend)
            except Exception as error:  # noqa: BLE001 - services fail in their own ways
                name = type(backend).__name__
                LOGGER.warning(
                    "%s gets no more metrics (%s: %s); all are in %s", name, type(error).__name__, error, self.path
                )
        self._backends = tuple(kept)

    def _keep_until(self, step: int | None) -> None:
        """Cut the file behind the last whole line of a step up to `step`; None: of any."""
        self._last, self._last_start = None, 0
        end = 0
        for start, stop, line in _lines(self.path):
            if step is not None and line.step > step:
                break
            self._last, self._last_start, end = line, start, stop
        self._file.truncate(end)

    @contextmanager
    def _guarded(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                "metrics cannot be written",
                where=str(self.path),
                why=error.strerror or str(error),
                help="make room there, or correct its permissions",
            ) from error


def read_metrics(path: Path) -> list[Metrics]:
    """Return the metrics in `path`, one item for each step in order; none when there is no such file."""
    return list(stream_metrics(path))


def stream_metrics(path: Path) -> Iterator[Metrics]:
    """Return the metrics in `path` one after another, without lines that are torn or being written.

    Raises:
        OSError: the file is there and cannot be read.
    """
    return (line for _, _, line in _lines(path))


def metrics_up_to(path: Path, step: int) -> bytes:
    """Return the content of a file that has the metrics of `path` up to `step`.

    Raises:
        OSError: the file is there and cannot be read.
    """
    return b"".join(_encode(line) for line in read_metrics(path) if line.step <= step)


def _lines(path: Path) -> Iterator[tuple[int, int, Metrics]]:
    """Return every whole line with the offsets of its first byte and behind its last one."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    stop = 0
    with file:
        # A line that is longer is none of ours; it comes in pieces, of which none is JSON.
        while raw := file.readline(_LONGEST_LINE):
            start, stop = stop, stop + len(raw)
            line = decode(raw)
            if line is not None:
                yield start, stop, line


def _encode(line: Metrics) -> bytes:
    metrics = {name: value if math.isfinite(value) else None for name, value in line.metrics.items()}
    return json.dumps({"step": line.step, "time": line.time, "metrics": metrics}).encode() + b"\n"


def decode(raw: bytes) -> Metrics | None:
    """Return the metrics of a line; None for one that is torn or none of ours."""
    try:
        return _decoded(raw) if raw.endswith(b"\n") else None
    except ValueError:
        return None


def faults(path: Path, most: int = 3) -> list[str]:
    """Return what is wrong with lines of a file of metrics, in words: line, field and value; at most `most`."""
    words: list[str] = []
    try:
        with open_regular(path) as file:
            number = 0
            while (raw := file.readline(_LONGEST_LINE)) and len(words) < most:
                number += 1
                try:
                    # The last one may be in the making.
                    if raw.endswith(b"\n") or len(raw) == _LONGEST_LINE:
                        _decoded(raw)
                except ValueError as error:
                    words.append(f"line {number} of {path.name} is left out: {error}")
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{path.name} cannot be read: it {error.strerror}"]
    return words


def _decoded(raw: bytes) -> Metrics:
    """Return the metrics of a whole line.

    Raises:
        ValueError: it has none; the message names the field and its value.
    """
    try:
        line = _Line.model_validate_json(raw)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None
    values = {name: math.nan if value is None else value for name, value in line.metrics.items()}
    return Metrics(line.step, line.time, values)
