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
from typing import Any, NamedTuple, Self, cast

from rlinf_core.errors import RunError
from rlinf_core.runners.metric_backends import MetricsBackend

LOGGER = logging.getLogger("rlinf")


class Metrics(NamedTuple):
    """The metrics of one step, written at `time` (seconds since 1970): numbers by name, nan where there was none."""

    step: int
    time: float
    metrics: Mapping[str, float]


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
            path.touch()
            self._file = open(path, "r+b", buffering=0)  # noqa: SIM115 - closed by `close`
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
        self._tell(lambda backend: backend.log(step, numbers))

    def rewind(self, step: int) -> None:
        """Drop what was written for steps after `step`: the run goes on from there.

        Raises:
            RunError: the file cannot be written.
        """
        with self._guarded():
            self._keep_until(step)
        self._tell(lambda backend: backend.rewind(step))

    def close(self) -> None:
        """Write out what backends hold back. Safe to call twice."""
        self._file.close()
        self._tell(lambda backend: backend.close())
        self._backends = ()

    def _tell(self, what: Callable[[MetricsBackend], None]) -> None:
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


def copy_metrics(old: Path, new: Path, step: int) -> None:
    """Write the metrics of `old` up to `step` to the new file `new`.

    Raises:
        OSError: it cannot be written.
    """
    new.write_bytes(b"".join(_encode(line) for line in read_metrics(old) if line.step <= step))


def _lines(path: Path) -> Iterator[tuple[int, int, Metrics]]:
    """Return every whole line with the offsets of its first byte and behind its last one."""
    if not path.exists():
        return
    stop = 0
    with path.open("rb") as file:
        for raw in file:
            start, stop = stop, stop + len(raw)
            line = decode(raw)
            if line is not None:
                yield start, stop, line


def _encode(line: Metrics) -> bytes:
    metrics = {name: value if math.isfinite(value) else None for name, value in line.metrics.items()}
    return json.dumps({"step": line.step, "time": line.time, "metrics": metrics}).encode() + b"\n"


def decode(raw: bytes) -> Metrics | None:
    """Return the metrics of a line; None for one that is torn or none of ours."""
    if not raw.endswith(b"\n"):
        return None
    try:
        data: Any = json.loads(raw)
        metrics = cast("dict[str, float | None]", data["metrics"])
        values = {name: math.nan if value is None else float(value) for name, value in metrics.items()}
        return Metrics(int(data["step"]), float(data["time"]), values)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
