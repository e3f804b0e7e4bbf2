"""A sweep: its plan as a queue of runs in one folder, which are started and followed, and their outcomes."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.console import COMMAND, shown
from rlinf_cli.interrupts import GRACE_SECONDS, ExitCode, command_signals
from rlinf_cli.live import labels
from rlinf_cli.run.driver import choose_cluster, refuse_elsewhere
from rlinf_cli.run.starting import check_installed
from rlinf_cli.run.sweep_plan import (
    SCHEMA,
    WAITING,
    Point,
    PointState,
    SweepPlan,
    config_ids,
    opened,
    overrides_of,
    plan_of,
    short_keys,
    states,
)
from rlinf_cli.runs.run_table import RunRow, rows_of
from rlinf_core import env_vars
from rlinf_core.config.composing.origins import inline
from rlinf_core.errors import ConfigError, RunError
from rlinf_core.foreign.files import open_log
from rlinf_core.runners.storage.run_folder import unused_path
from rlinf_core.runners.storage.run_status import RunStatus

LOGS: Final = "logs"
# Seconds between two checks of the run folders.
_PAUSE: Final = 0.5
_CHANGED: Final = "the file has changed since the sweep began, so it was not started"

OnChange = Callable[[Mapping[str, PointState]], None]


def _environment(folder: Path, parallel: int, *, waits: bool) -> dict[str, str]:
    """Return the environment of a run; concurrent runs of a sweep share devices only with each other."""
    if env_vars.CLAIMS.get() != "wait":
        return dict(os.environ)
    # The name is the same for runs that outlive this queue, and on the head that runs a driver.
    group = f"group:{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}"
    return {**os.environ, env_vars.CLAIMS.name: group if parallel > 1 else "wait" if waits else "no-wait"}


class RunQueue:
    """The unfinished runs of a sweep.

    A run that was interrupted, killed or failed resumes from its newest checkpoint, or begins again without one. If a
    run has outlived an earlier queue, the queue waits for it.

    Args:
        folder: the folder of the sweep.
        parallel: the maximum number of concurrent runs.
        on_change: called with the state of all runs at each check.
        ids: the digests of the planned configurations by run name; None to start runs as the file is then.
        waits: whether a run waits while another job holds its devices; otherwise the run fails.
        patience: seconds without a new step after which a run is ended; None for no limit.

    Attributes:
        stalled: the runs that were ended for lack of a new step.
    """

    def __init__(
        self,
        plan: SweepPlan,
        folder: Path,
        parallel: int,
        on_change: OnChange,
        *,
        ids: Mapping[str, str] | None = None,
        waits: bool = True,
        patience: float | None = None,
    ) -> None:
        self._plan, self._folder, self._parallel, self._on_change = plan, folder, parallel, on_change
        self._ids, self._waits, self._patience = ids, waits, patience
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._interrupted = False
        # Why a run did not get a run folder.
        self._unstarted: dict[str, str] = {}
        # The last step of each run, and the deadline for its next step.
        self._limits: dict[str, tuple[int, float]] = {}
        self.stalled: set[str] = set()

    def work(self) -> dict[str, PointState]:
        """Run all unfinished points, and return the state of each run at the end.

        The first signal ends all runs as it ends `rlinf train`; a second signal ends them at once.
        """
        with command_signals.calling(self._interrupt):
            try:
                return self._work()
            finally:
                self._end_children()

    def _work(self) -> dict[str, PointState]:
        current = states(self._folder, self._plan)
        outlived = {name for name, state in current.items() if state.status == RunStatus.RUNNING}
        pending = [
            point
            for point in self._plan.points
            if point.name not in outlived and current[point.name].status != RunStatus.FINISHED
        ]
        while True:
            for name in [name for name, child in self._children.items() if child.poll() is not None]:
                code = self._children.pop(name).poll()
                self._unstarted[name] = f"exit status {code} before it had a run folder, see {LOGS}/{name}.log"
            outlived = {name for name in outlived if current[name].status == RunStatus.RUNNING}
            while pending and not self._interrupted and len(self._children) + len(outlived) < self._parallel:
                point = pending.pop(0)
                if self._is_planned(point):
                    self._children[point.name] = self._start(point, current[point.name])
                else:
                    self._unstarted[point.name] = _CHANGED
            current = self._shown(self._judged(states(self._folder, self._plan)))
            self._end_stalled(current)
            if not self._children and (self._interrupted or not (outlived or pending)):
                return current
            time.sleep(_PAUSE)

    def _shown(self, current: dict[str, PointState]) -> dict[str, PointState]:
        shown = {
            # A child counts as running before it has a run folder, and while it writes its report.
            name: state._replace(status=RunStatus.RUNNING, reason="") if name in self._children else state
            for name, state in current.items()
        }
        self._on_change(shown)
        return current

    def _judged(self, current: dict[str, PointState]) -> dict[str, PointState]:
        """Return the states, in which a run that was not started, or ended without a run folder, has failed."""
        for name, why in self._unstarted.items():
            if not self._interrupted and (current[name].run is None or why is _CHANGED):
                current[name] = PointState(current[name].run, RunStatus.FAILED, why)
        return current

    def _is_planned(self, point: Point) -> bool:
        """Return whether a run of the file as it is now would be the planned one; the file's errors are printed."""
        if self._ids is None:
            return True
        try:
            return config_ids(self._plan._replace(points=(point,)), self._folder)[point.name] == self._ids[point.name]
        except (typer.Exit, ConfigError):
            return False

    def _start(self, point: Point, state: PointState) -> subprocess.Popen[bytes]:
        overrides = overrides_of(self._plan, point, self._folder)
        if state.run is not None and state.run.checkpoints.latest() is not None:
            overrides.append(f"runner.resume_dir={inline(str(state.run.path))}")
        argv = [*COMMAND, "train", self._plan.file, *overrides]
        log = open_log(self._folder, f"{LOGS}/{point.name}.log")
        try:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Only this process receives Ctrl-C from the terminal, and forwards it.
                start_new_session=True,
                env=_environment(self._folder, self._parallel, waits=self._waits),
            )
        finally:
            os.close(log)

    def _end_stalled(self, current: Mapping[str, PointState]) -> None:
        """End runs that had no new step for too long: cleanly, or at once if the clean end also takes too long."""
        if self._patience is None:
            return
        now = time.monotonic()
        for name, child in self._children.items():
            step, limit = self._limits.get(name, (-1, 0.0))
            if name not in self.stalled and step != current[name].step:
                self._limits[name] = (current[name].step, now + self._patience)
            elif now > limit:
                self.stalled.add(name)
                self._limits[name] = (step, now + GRACE_SECONDS)
                child.send_signal(signal.SIGINT)

    def _interrupt(self) -> None:
        self._interrupted = True
        for child in self._children.values():
            child.send_signal(signal.SIGINT)

    def _end_children(self) -> None:
        """End the remaining runs: at once after a second signal, cleanly after an error of the queue."""
        for child in self._children.values():
            child.send_signal(signal.SIGINT)
        for child in self._children.values():
            child.wait()


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


def _train(plan: SweepPlan, place: Path, ids: Mapping[str, str], parallel: int) -> Mapping[str, PointState]:
    """Run all unfinished points, and return the state of each run at the end.

    Raises:
        ConfigError: the head of the cluster is another machine, which would get the run folders.
    """
    refuse_elsewhere(plan.parts, plan.file, "and the runs would be written there", "start the sweep")
    check_installed()
    choose_cluster(plan.parts, plan.file, already_shown=False)
    with opened(place, plan, ids) as there:
        current = states(place, plan)
        _check_visible(place, current)
        console.message(f"{'continued' if there else 'new'} sweep {place}: {_counts(current)}")
        console.message(f"`rlinf runs --runs-dir {shlex.quote(shown(place))}` shows its runs")
        return RunQueue(plan, place, parallel, _teller(plan.points), ids=ids).work()


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


def _row(state: PointState) -> RunRow | None:
    return None if state.run is None else rows_of([state.run])[0]


def _table(points: Sequence[Point], current: Mapping[str, PointState], rows: Mapping[str, RunRow | None]) -> str:
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


def _counts(current: Mapping[str, PointState]) -> str:
    """Return the number of runs by status, as in `3 of 12 finished, 2 running, 7 waiting`."""
    counts = Counter(state.status for state in current.values())
    others = [status for status in (*RunStatus, WAITING) if status != RunStatus.FINISHED and counts[status]]
    finished = f"{counts[RunStatus.FINISHED]} of {len(current)} finished"
    return ", ".join([finished, *(f"{counts[status]} {status}" for status in others)])


def _record(
    folder: Path,
    points: Sequence[Point],
    current: Mapping[str, PointState],
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
    return {"schema": SCHEMA, "folder": str(folder), "runs": runs}


def _teller(points: Sequence[Point]) -> OnChange:
    """Return a function for the queue that prints a line for each changed status of a run."""
    before = dict.fromkeys((point.name for point in points), WAITING)

    def tell(current: Mapping[str, PointState]) -> None:
        for point in points:
            state = current[point.name]
            if before[point.name] != state.status:
                console.message(_line(point, state))
            before[point.name] = state.status

    return tell


def _line(point: Point, state: PointState) -> str:
    number, row = point.name.partition("-")[0], _row(state)
    if state.status == RunStatus.RUNNING:
        return f"run {number} started: {', '.join(f'{key} {value}' for key, value in point.values.items())}"
    text = f"run {number} {state.status} after step {state.step}"
    details = [state.reason.partition("\n")[0]]
    if row is not None:
        details = [row.result, *details, shown(row.run.path)]
    return ": ".join(part for part in (text, ", ".join(filter(None, details))) if part)


def _check_visible(folder: Path, current: Mapping[str, PointState]) -> None:
    """Refuse to continue a sweep with a run that may be active on another machine.

    Raises:
        RunError: the sweep has such a run.
    """
    for state in current.values():
        if state.status == RunStatus.UNKNOWN and state.run is not None:
            raise RunError(
                f"run {state.run.path.name} may be active on another machine",
                where=str(folder),
                why=state.reason,
                help=f"go on there, or release it with `rlinf stop {shlex.quote(str(state.run.path))} --force`",
            )
