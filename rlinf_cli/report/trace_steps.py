"""Extraction of single steps from a run's trace: a whole trace is too large for a page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, NamedTuple, cast

from pydantic import Field, ValidationError

from rlinf_core.foreign.file_models import FileModel
from rlinf_core.foreign.files import open_regular

# The timestamp of an event, in microseconds since 1970, without parsing the whole line as JSON.
_MOMENT: Final = re.compile(r'"ts":\s*([0-9.eE+]+)')
_TRANSFER_ENDS: Final = "e"
_LONGEST_LINE: Final = 1 << 20


class _Event(FileModel):
    ph: str = ""
    pid: int = -1
    id: int = -1
    dur: Annotated[float, Field(ge=0, lt=1e15)] = 0.0
    cat: str = ""
    name: str = ""
    args: dict[str, Any] = Field(default_factory=dict[str, Any])


class TraceBar(NamedTuple):
    """An activity of a process within a step.

    Attributes:
        process: the process, as in `actor:0`.
        kind: phase, method, timer, wait or transfer.
        name: what it was.
        start: seconds from the beginning of the step; negative where it began before.
        seconds: the duration, in seconds.
    """

    process: str
    kind: str
    name: str
    start: float
    seconds: float


def bars_of_steps(
    path: Path, windows: Mapping[int, tuple[float, float]], most: int = 1500
) -> dict[int, tuple[list[TraceBar], int]]:
    """Return the activities of selected steps, by step: the `most` longest bars in order of time, and the number left
    out.

    Args:
        path: the trace, which may still be growing; read once, line by line.
        windows: start and end of each step, in seconds since 1970.
        most: the maximum number of bars in a step.

    Raises:
        OSError: the trace cannot be read.
    """
    names: dict[int, str] = {}
    bars_by_step: dict[int, list[TraceBar]] = {step: [] for step in windows}
    open_transfers: dict[int, float] = {}
    for line in _lines(path):
        moment = _MOMENT.search(line)
        if moment is None:
            _take_name(line, names)
            continue
        # No activity lasts a day, so older events are irrelevant.
        try:
            at = float(moment[1]) / 1e6
        except ValueError:
            continue
        if not any(begin - 86400 < at < end for begin, end in windows.values()):
            continue
        event = _event(line)
        if event is None:
            continue
        began, seconds = at, event.dur / 1e6
        if event.ph == "b":
            open_transfers[event.id] = at
            continue
        if event.ph == _TRANSFER_ENDS:
            began = open_transfers.pop(event.id, at)
            seconds = at - began
        process = names.get(event.pid, "?")
        for step, (begin, end) in windows.items():
            if began < end and began + seconds > begin:
                bars_by_step[step].append(TraceBar(process, event.cat, event.name, began - begin, seconds))
    return {step: _longest(bars, most) for step, bars in bars_by_step.items()}


def _lines(path: Path) -> Iterator[str]:
    with TextIOWrapper(cast("BinaryIO", open_regular(path)), encoding="utf-8", errors="replace") as file:
        while line := file.readline(_LONGEST_LINE):
            yield line


def _longest(bars: list[TraceBar], most: int) -> tuple[list[TraceBar], int]:
    kept = sorted(bars, key=lambda bar: -bar.seconds)[:most]
    return sorted(kept, key=lambda bar: bar.start), len(bars) - len(kept)


def _take_name(line: str, names: dict[int, str]) -> None:
    """Record the name of a process, if the line holds one."""
    if '"process_name"' not in line:
        return
    event = _event(line)
    if event is not None:
        names[event.pid] = str(event.args.get("name", "?"))


def _event(line: str) -> _Event | None:
    try:
        return _Event.model_validate_json(line.rstrip().rstrip(","))
    except ValidationError:
        return None
