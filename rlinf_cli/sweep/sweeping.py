"""A sweep: every combination of several values, as a queue of runs in one folder."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.console.interrupts import command_signals
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.live import labels
from rlinf_cli.live.run_summary import shown
from rlinf_cli.run.remote_driver import choose_cluster, refuse_elsewhere
from rlinf_cli.run.starting import check_installed
from rlinf_cli.runs.run_table import RunRow, rows_of
from rlinf_cli.sweep.plan import Point, SweepPlan, config_ids, plan_of, short_keys
from rlinf_cli.sweep.queue import SCHEMA, WAITING, PointState, RunQueue, check_visible, new_folder, opened, states
from rlinf_core.runners.storage.run_status import RunStatus


def sweep(
    file: str,
    overrides: Sequence[str],
    swept: Sequence[str],
    seeds: int,
    parallel: int,
    folder: Path | None,
    again: Sequence[str],
    *,
    dry_run: bool,
) -> Result:
    """Run a sweep, and return how its runs ended; or return its plan.

    Args:
        file, overrides, swept, seeds: see `plan_of`.
        parallel: the number of runs at the same time.
        folder: a new folder, or that of this sweep to continue; None: a new one in the folder of runs.
        again: the command line, for going on.
        dry_run: whether only the plan is wanted.

    Raises:
        RLinfError: it cannot be started.
        typer.Exit: a run has errors, which are printed on standard error.
    """
    plan = plan_of(file, overrides, swept, seeds)
    if len(plan.points) == 1:
        raise typer.BadParameter("nothing to sweep: give a key several values, `lr=1e-4,3e-4`, or use `--seeds N`")
    place = (folder or new_folder(plan.log_path)).absolute()
    ids = config_ids(plan, place)
    if dry_run:
        return _plan_result(plan.points)
    current = _train(plan, place, ids, parallel)
    notes = (_counts(current), *_next(place, current, again))
    return Result(
        lambda: _table(plan.points, current),
        lambda: _record(place, plan.points, current),
        _code(current),
        notes,
    )


def _train(plan: SweepPlan, place: Path, ids: Mapping[str, str], parallel: int) -> Mapping[str, PointState]:
    """Run what is not finished yet, and return how each run ended.

    Raises:
        ConfigError: the head of the cluster is another machine, where the runs would be written.
    """
    refuse_elsewhere(plan.parts, plan.file, "and the runs would be written there", "start the sweep")
    check_installed()
    choose_cluster(plan.parts, plan.file, already_shown=False)
    with opened(place, plan, ids) as there:
        current = states(place, plan)
        check_visible(place, current)
        console.message(f"{'continued' if there else 'new'} sweep {place}: {_counts(current)}")
        console.message(f"`rlinf runs --runs-dir {shown(place)}` shows its runs")
        return RunQueue(plan, place, parallel, _Changes(plan.points).show).work()


def _plan_result(points: Sequence[Point]) -> Result:
    runs = [{"name": point.name, "values": point.values} for point in points]

    def text() -> str:
        heads = ("run", *_keys(points))
        return console.table(heads, [(point.name, *point.values.values()) for point in points])

    valid = f"\n{len(points)} runs are valid; nothing was started, and nothing written"
    return Result(text, {"schema": "rlinf.sweep_plan/1", "runs": runs}, notes=(valid,))


def _code(current: Mapping[str, PointState]) -> ExitCode:
    if command_signals.code is not None:
        return command_signals.code
    finished = all(state.status == RunStatus.FINISHED for state in current.values())
    return ExitCode.OK if finished else ExitCode.FAILED


def _next(place: Path, current: Mapping[str, PointState], again: Sequence[str]) -> list[str]:
    """Return what can be done next."""
    statuses = [state.status for state in current.values()]
    lines: list[str] = []
    if any(status != RunStatus.FINISHED for status in statuses):
        lines.append(f"continue with: {shlex.join([*again, '--folder', str(place)])}")
    if statuses.count(RunStatus.FINISHED) > 1:
        lines.append(f"compare with: {shlex.join(['rlinf', 'compare', str(place), '-o', 'sweep.png'])}")
    return lines


def _keys(points: Sequence[Point]) -> Sequence[str]:
    """Return the shortest names of the swept keys."""
    return list(short_keys(list(points[0].values)).values())


def _row(state: PointState) -> RunRow | None:
    return None if state.run is None else rows_of([state.run])[0]


def _table(points: Sequence[Point], current: Mapping[str, PointState]) -> str:
    """Return the table of all runs: that of `rlinf runs` with the swept values."""
    heads = ("run", *_keys(points), "status", "step", "result", "time")
    rows: list[tuple[str, ...]] = []
    for point in points:
        state, row = current[point.name], _row(current[point.name])
        seconds = "" if row is None else labels.clock((row.run.state.ended or time.time()) - row.run.state.created)
        number = point.name.partition("-")[0]
        rows.append((number, *point.values.values(), state.status, str(state.step), row.result if row else "", seconds))
    return console.table(heads, rows, right=(len(heads) - 3, len(heads) - 1), keep=(0, len(heads) - 4))


def _counts(current: Mapping[str, PointState]) -> str:
    """Return `3 of 12 finished, 2 running, 7 waiting`."""
    counts = Counter(state.status for state in current.values())
    others = [status for status in (*RunStatus, WAITING) if status != RunStatus.FINISHED and counts[status]]
    finished = f"{counts[RunStatus.FINISHED]} of {len(current)} finished"
    return ", ".join([finished, *(f"{counts[status]} {status}" for status in others)])


def _record(folder: Path, points: Sequence[Point], current: Mapping[str, PointState]) -> dict[str, Any]:
    """Return the result of the sweep as data."""
    runs: list[dict[str, Any]] = []
    for point in points:
        state, row = current[point.name], _row(current[point.name])
        record = None if row is None else row.record()
        runs.append(
            {
                "name": point.name,
                "values": dict(point.values),
                "status": state.status,
                "reason": state.reason,
                "step": state.step,
                "result": record and record["result"],
                "folder": record and record["folder"],
            }
        )
    return {"schema": SCHEMA, "folder": str(folder), "runs": runs}


class _Changes:
    """A line for each change of a run, while the queue works."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = points
        self._before: dict[str, str] = {}

    def show(self, current: Mapping[str, PointState]) -> None:
        """Print what has changed since the last call."""
        for point in self._points:
            state = current[point.name]
            if self._before.get(point.name, WAITING) != state.status:
                console.message(_line(point, state))
            self._before[point.name] = state.status


def _line(point: Point, state: PointState) -> str:
    number, row = point.name.partition("-")[0], _row(state)
    if state.status == RunStatus.RUNNING:
        return f"run {number} started: {', '.join(f'{key} {value}' for key, value in point.values.items())}"
    text = f"run {number} {state.status} after step {state.step}"
    if row is None:
        return text
    details = [row.result, state.reason.partition("\n")[0], shown(row.run.path)]
    return f"{text}: {', '.join(part for part in details if part)}"
