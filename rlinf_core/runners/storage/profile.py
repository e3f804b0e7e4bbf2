"""`profile.json` of a run: the durations of its processes' timed calls, by rows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from rlinf_core.foreign.files import FileModel, read_model
from rlinf_core.runners.storage import durable
from rlinf_core.worker.timer import CallRecord, call_records, size_of

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
