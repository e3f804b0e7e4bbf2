"""The table of a sweep, while it runs and at its end, and its record as data."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rlinf_cli.console import console
from rlinf_cli.live import labels
from rlinf_cli.live.run_summary import shown
from rlinf_cli.runs.run_table import rows_of
from rlinf_cli.sweep.grid import Point, short_keys
from rlinf_cli.sweep.sweep_folder import SCHEMA, WAITING, PointState
from rlinf_core.runners.storage.run_status import RunStatus

Cells = tuple[str, ...]
_STYLES: Final[dict[str, str]] = {RunStatus.RUNNING: "bold", RunStatus.FAILED: "red"}


def headers(points: Sequence[Point]) -> Cells:
    """Return the heads of the columns: the shortest names of the swept keys among them."""
    return ("run", *short_keys(list(points[0].values)).values(), "status", "step", "result", "time")


def cells_of(points: Sequence[Point], current: Mapping[str, PointState]) -> list[Cells]:
    """Return the row of each run."""
    return [_cells(point, current[point.name]) for point in points]


def _cells(point: Point, state: PointState) -> Cells:
    row = rows_of([state.run])[0] if state.run is not None else None
    seconds = labels.clock((row.ended or time.time()) - row.created) if row is not None else ""
    result = row.result if row is not None else ""
    return (point.name.partition("-")[0], *point.values.values(), state.status, str(state.step), result, seconds)


def sweep_text(points: Sequence[Point], current: Mapping[str, PointState]) -> str:
    """Return the table of all runs, and why some failed."""
    heads = headers(points)
    numbers = (len(heads) - 3, len(heads) - 1)
    return console.table(heads, cells_of(points, current), right=numbers, keep=(0, len(heads) - 4))


def counts_text(current: Mapping[str, PointState]) -> str:
    """Return `3 of 12 finished, 2 running, 7 waiting`."""
    counts = Counter(state.status for state in current.values())
    others = [
        f"{counts[status]} {status}"
        for status in (*(status for status in RunStatus if status != RunStatus.FINISHED), WAITING)
        if counts[status]
    ]
    return ", ".join([f"{counts[RunStatus.FINISHED]} of {len(current)} finished", *others])


def sweep_record(folder: Path, points: Sequence[Point], current: Mapping[str, PointState]) -> dict[str, Any]:
    """Return the result of the sweep as data."""
    runs: list[dict[str, Any]] = []
    for point in points:
        state = current[point.name]
        run = None if state.run is None else rows_of([state.run])[0].record()
        runs.append(
            {
                "name": point.name,
                "values": dict(point.values),
                "status": state.status,
                "reason": state.reason,
                "step": state.step,
                "result": run and run["result"],
                "folder": run and run["folder"],
            }
        )
    return {"schema": SCHEMA, "folder": str(folder), "runs": runs}


class SweepView:
    """The view of a sweep while it runs: on a terminal a table, elsewhere a line for each change.

    Args:
        points: its runs, in order.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = points
        self._current: Mapping[str, PointState] = {}
        self._live: Any = None

    def __enter__(self) -> Self:
        if console.colored(sys.stderr) and not console.verbosity.quiet:
            from rich.console import Console
            from rich.live import Live

            from rlinf_cli.console.terminal_stream import unguarded_stream

            screen = Console(
                file=unguarded_stream(sys.stderr), highlight=False, markup=False, emoji=False, legacy_windows=False
            )
            self._live = Live(console=screen, auto_refresh=False, transient=True, vertical_overflow="ellipsis")
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, current: Mapping[str, PointState]) -> None:
        """Show the state of all runs."""
        before, self._current = self._current, current
        if self._live is not None:
            self._draw(current)
            return
        for point in self._points:
            state, earlier = current[point.name], before.get(point.name)
            if earlier is not None and earlier.status == state.status:
                continue
            line = _line(point, state)
            if line is not None:
                console.message(line)

    def _draw(self, current: Mapping[str, PointState]) -> None:
        from rich.table import Table
        from rich.text import Text

        from rlinf_core.foreign.terminal_text import replaced

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", caption_justify="left")
        for head in headers(self._points):
            table.add_column(head, no_wrap=True)
        for point, cells in zip(self._points, cells_of(self._points, current), strict=True):
            style = _STYLES.get(current[point.name].status, "")
            table.add_row(*(Text(replaced(cell)) for cell in cells), style=style)
        table.caption = counts_text(current)
        self._live.update(table, refresh=True)


def _line(point: Point, state: PointState) -> str | None:
    """Return a change as a line; None for one that needs no line."""
    values = ", ".join(f"{key} {value}" for key, value in point.values.items())
    number = point.name.partition("-")[0]
    if state.status == WAITING:
        return None
    if state.status == RunStatus.RUNNING:
        return f"run {number} started: {values}"
    text = f"run {number} {state.status} after step {state.step}"
    if state.run is None:
        return text
    result = rows_of([state.run])[0].result
    details = [result, state.reason.splitlines()[0] if state.reason else "", shown(state.run.path)]
    return f"{text}: {', '.join(part for part in details if part)}"
