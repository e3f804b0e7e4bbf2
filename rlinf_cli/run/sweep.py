"""A sweep: every combination of several values, as a queue of runs in one folder."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.console import shown
from rlinf_cli.interrupts import ExitCode, command_signals
from rlinf_cli.live import labels
from rlinf_cli.run import sweep_queue
from rlinf_cli.run.driver import choose_cluster, refuse_elsewhere
from rlinf_cli.run.starting import check_installed
from rlinf_cli.run.sweep_plan import Point, SweepPlan, config_ids, plan_of, short_keys
from rlinf_cli.runs.run_table import RunRow, rows_of
from rlinf_core.runners.storage.run_folder import unused_path
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
    """Run a sweep and return the outcomes of its runs, or return only its plan.

    Args:
        file, overrides, swept, seeds: the arguments of `plan_of`.
        parallel: the number of concurrent runs.
        folder: a new folder, or the folder of this sweep to continue; None for a new folder in the folder of runs.
        again: the command line that continues the sweep.
        dry_run: whether to return only the plan.

    Raises:
        RLinfError: the sweep cannot be started.
        typer.Exit: a run has errors, which were printed on standard error.
    """
    plan = plan_of(file, overrides, swept, seeds)
    if len(plan.points) == 1:
        raise typer.BadParameter("nothing to sweep: give a key several values, `lr=1e-4,3e-4`, or use `--seeds N`")
    place = (folder or unused_path(plan.log_path, "sweep")).absolute()
    ids = config_ids(plan, place)
    if dry_run:
        return _plan_result(plan.points)
    current = _train(plan, place, ids, parallel)
    finished = [state for state in current.values() if state.status == RunStatus.FINISHED]
    notes = [_counts(current)]
    if len(finished) < len(current):
        notes.append(f"continue with: {shlex.join([*again, '--folder', str(place)])}")
    if len(finished) > 1:
        notes.append(f"compare with: {shlex.join(['rlinf', 'compare', str(place), '-o', 'sweep.png'])}")
    code = command_signals.code or (ExitCode.OK if len(finished) == len(current) else ExitCode.FAILED)
    rows = {name: _row(state) for name, state in current.items()}
    return Result(
        lambda: _table(plan.points, current, rows),
        lambda: _record(place, plan.points, current, rows),
        code,
        tuple(notes),
    )


def _train(plan: SweepPlan, place: Path, ids: Mapping[str, str], parallel: int) -> Mapping[str, sweep_queue.PointState]:
    """Run all unfinished points, and return the state of each run at the end.

    Raises:
        ConfigError: the head of the cluster is another machine, which would get the run folders.
    """
    refuse_elsewhere(plan.parts, plan.file, "and the runs would be written there", "start the sweep")
    check_installed()
    choose_cluster(plan.parts, plan.file, already_shown=False)
    with sweep_queue.opened(place, plan, ids) as there:
        current = sweep_queue.states(place, plan)
        sweep_queue.check_visible(place, current)
        console.message(f"{'continued' if there else 'new'} sweep {place}: {_counts(current)}")
        console.message(f"`rlinf runs --runs-dir {shlex.quote(shown(place))}` shows its runs")
        return sweep_queue.RunQueue(plan, place, parallel, _teller(plan.points), ids=ids).work()


def _plan_result(points: Sequence[Point]) -> Result:
    runs = [{"name": point.name, "values": point.values} for point in points]

    def text() -> str:
        heads = ("run", *_keys(points))
        return console.table(heads, [(point.name, *point.values.values()) for point in points])

    valid = f"\n{len(points)} runs are valid; nothing was started, and nothing written"
    return Result(text, {"schema": "rlinf.sweep_plan/1", "runs": runs}, notes=(valid,))


def _keys(points: Sequence[Point]) -> Sequence[str]:
    """Return the shortest names of the swept keys."""
    return list(short_keys(list(points[0].values)).values())


def _row(state: sweep_queue.PointState) -> RunRow | None:
    return None if state.run is None else rows_of([state.run])[0]


def _table(
    points: Sequence[Point], current: Mapping[str, sweep_queue.PointState], rows: Mapping[str, RunRow | None]
) -> str:
    """Return the table of all runs, like the table of `rlinf runs` with the swept values."""
    heads = ("run", *_keys(points), "status", "step", "result", "time")
    cells: list[tuple[str, ...]] = []
    for point in points:
        state, row = current[point.name], rows[point.name]
        seconds = "" if row is None else labels.clock((row.run.state.ended or time.time()) - row.run.state.created)
        result = "" if row is None else row.result
        number = point.name.partition("-")[0]
        cells.append((number, *point.values.values(), state.status, str(state.step), result, seconds))
    return console.table(heads, cells, right=(len(heads) - 3, len(heads) - 1), keep=(0, len(heads) - 4))


def _counts(current: Mapping[str, sweep_queue.PointState]) -> str:
    """Return the number of runs by status, as in `3 of 12 finished, 2 running, 7 waiting`."""
    counts = Counter(state.status for state in current.values())
    others = [status for status in (*RunStatus, sweep_queue.WAITING) if status != RunStatus.FINISHED and counts[status]]
    finished = f"{counts[RunStatus.FINISHED]} of {len(current)} finished"
    return ", ".join([finished, *(f"{counts[status]} {status}" for status in others)])


def _record(
    folder: Path,
    points: Sequence[Point],
    current: Mapping[str, sweep_queue.PointState],
    rows: Mapping[str, RunRow | None],
) -> dict[str, Any]:
    """Return the result of the sweep as data."""
    runs: list[dict[str, Any]] = []
    for point in points:
        state, row = current[point.name], rows[point.name]
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
    return {"schema": sweep_queue.SCHEMA, "folder": str(folder), "runs": runs}


def _teller(points: Sequence[Point]) -> sweep_queue.OnChange:
    """Return a function for the queue that prints a line for each changed status of a run."""
    before = dict.fromkeys((point.name for point in points), sweep_queue.WAITING)

    def tell(current: Mapping[str, sweep_queue.PointState]) -> None:
        for point in points:
            state = current[point.name]
            if before[point.name] != state.status:
                console.message(_line(point, state))
            before[point.name] = state.status

    return tell


def _line(point: Point, state: sweep_queue.PointState) -> str:
    number, row = point.name.partition("-")[0], _row(state)
    if state.status == RunStatus.RUNNING:
        return f"run {number} started: {', '.join(f'{key} {value}' for key, value in point.values.items())}"
    text = f"run {number} {state.status} after step {state.step}"
    details = [state.reason.partition("\n")[0]]
    if row is not None:
        details = [row.result, *details, shown(row.run.path)]
    return ": ".join(part for part in (text, ", ".join(filter(None, details))) if part)
