"""A sweep: every combination of several values, as a queue of runs in one folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.console.interrupts import command_signals
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.run.remote_driver import choose_cluster, cluster_elsewhere
from rlinf_cli.run.runnable import check_installed
from rlinf_cli.sweep.grid import Point, short_keys
from rlinf_cli.sweep.plan import SweepPlan, config_ids, plan_of
from rlinf_cli.sweep.run_queue import RunQueue
from rlinf_cli.sweep.sweep_folder import PointState, check_visible, new_folder, opened, states
from rlinf_cli.sweep.sweep_table import SweepView, counts_text, sweep_record, sweep_text
from rlinf_core.errors import ConfigError
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
    notes = (counts_text(current), *_next(place, current, again))
    return Result(
        lambda: sweep_text(plan.points, current),
        lambda: sweep_record(place, plan.points, current),
        _code(current),
        notes,
    )


def _train(plan: SweepPlan, place: Path, ids: Mapping[str, str], parallel: int) -> Mapping[str, PointState]:
    """Run what is not finished yet, and return how each run ended.

    Raises:
        ConfigError: the head of the cluster is another machine, where the runs would be written.
    """
    if cluster_elsewhere(plan.parts, plan.file) is not None:
        raise ConfigError(
            "the head of this file's cluster is another machine, and the runs would be written there",
            where=plan.parts.name,
            help="log in to the head, and start the sweep there",
        )
    check_installed()
    choose_cluster(plan.parts, plan.file, already_shown=False)
    with opened(place, plan, ids) as there:
        current = states(place, plan)
        check_visible(place, current)
        console.message(f"{'continued' if there else 'new'} sweep {place}: {counts_text(current)}")
        with SweepView(plan.points) as view:
            return RunQueue(plan, place, parallel, view.show).work()


def _plan_result(points: Sequence[Point]) -> Result:
    runs = [{"name": point.name, "values": point.values} for point in points]

    def text() -> str:
        heads = ("run", *short_keys(list(points[0].values)).values())
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
