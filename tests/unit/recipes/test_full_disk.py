"""A disk that fills while a record is appended: the record is an error, and those before and after it are whole."""

from __future__ import annotations

import resource
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from recipes.embodied.off_policy.segments import SegmentWriter, read_segments
from recipes.embodied.off_policy.storage import ReplayError
from recipes.serve.service.ledger import Ledger, RequestKey
from recipes.serve.service.state_file import REQUESTS, StateFile
from rlinf_core.errors import RunError
from rlinf_core.runners.metrics import MetricsWriter, read_metrics
from rlinf_core.runners.storage.run_events import append_event, story_with_faults

LONG = "x" * 300


@contextmanager
def room(size: int) -> Generator[None]:
    """Let no file grow beyond some bytes: a write takes what fits, as on a disk that fills, and the next one fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Appending(NamedTuple):
    """Appends the record of a number, and returns the numbers of all records."""

    append: Callable[[int], Any]
    read: Callable[[], list[int]]
    file: Callable[[], Path]
    error: type[Exception]


def requests(folder: Path) -> Appending:
    writer = Ledger(StateFile(folder), "b0")
    writer.file.begin_session("b0-1", "ann")
    return Appending(
        lambda number: writer.promise("ann", "b0-1", RequestKey("request", "m", number), b"", "r", {}, LONG.encode()),
        lambda: [stored.key.number for stored in writer.requests("b0-1")],
        lambda: folder / f"{REQUESTS}-wal",
        RunError,
    )


def run_events(folder: Path) -> Appending:
    def read() -> list[int]:
        story, faults = story_with_faults(folder)
        assert not faults
        return [event.step for event in story]

    return Appending(
        lambda number: append_event(folder, "note", number, LONG), read, lambda: folder / "events.jsonl", OSError
    )


def recording(folder: Path) -> Appending:
    writer = SegmentWriter(folder)
    # Each has a file of its own, which may be as large as the one before.
    return Appending(
        lambda number: writer.append({"number": np.array(number), "values": np.arange(50 * number)}),
        lambda: [int(record["number"]) for record in read_segments(folder)],
        lambda: next(folder.glob("*.rlr")),
        ReplayError,
    )


@pytest.mark.parametrize("made", [requests, run_events, recording], ids=lambda made: made.__name__)
def test_a_record_without_room_spoils_no_other(tmp_path: Path, made: Callable[[Path], Appending]) -> None:
    writer = made(tmp_path)
    for number in (1, 2):
        writer.append(number)
    with room(writer.file().stat().st_size + 100), pytest.raises(writer.error):
        writer.append(3)
    assert writer.read() == [1, 2]
    writer.append(4)
    assert writer.read() == [1, 2, 4]


def test_metrics_without_room_are_written_later(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(file) as writer:
        writer.log(1, {"a": 1.0})
        with room(file.stat().st_size + 10):
            writer.log(2, {LONG: 2.0})
        assert [line.step for line in read_metrics(file)] == [1]
        writer.log(3, {"a": 3.0})
    assert [line.step for line in read_metrics(file)] == [1, 2, 3]
