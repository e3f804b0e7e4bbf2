"""The folder of a sweep, the progress of its runs, and the queue that starts and follows them."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import typer
from pydantic import Field

from rlinf_cli.console import COMMAND
from rlinf_cli.interrupts import GRACE_SECONDS, command_signals
from rlinf_cli.run.sweep_plan import Point, SweepPlan, config_ids, overrides_of
from rlinf_cli.runs.run_lookup import SWEEP, all_runs
from rlinf_core import env_vars
from rlinf_core.config.composing.origins import inline
from rlinf_core.errors import ConfigError, RunError
from rlinf_core.foreign.files import BadFileError, FileModel, Name, open_log, read_model, write_fault
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus

SCHEMA: Final = "rlinf.sweep/1"
_MOST_BYTES: Final = 16 << 20
_MOST_NAMED: Final = 5


class SweptRun(FileModel):
    """A planned run of the sweep.

    Attributes:
        config_id: the digest of its configuration.
    """

    name: Name
    values: dict[str, str]
    config_id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class _SweepFile(FileModel):
    schema_: Annotated[Literal["rlinf.sweep/1"], Field(alias="schema")]
    runs: tuple[SweptRun, ...] = Field(strict=False)


class PointState(NamedTuple):
    """The progress of a point's run.

    Attributes:
        run: the newest run folder of the point; None before the first.
        status: the status of that run; `waiting` before the first.
    """

    run: RunFolder | None
    status: str
    reason: str = ""

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.run.state.step if self.run is not None else 0


WAITING: Final = "waiting"


@contextmanager
def opened(folder: Path, plan: SweepPlan, ids: Mapping[str, str]) -> Generator[bool, None, None]:
    """Lock the folder of a sweep: a new folder, or an existing folder of the same sweep, whose runs are continued.

    Yields:
        Whether the sweep existed.

    Raises:
        RunError: the folder belongs to another sweep, is in use by another process, or cannot be written.
    """
    file = folder / SWEEP
    runs = tuple(
        SweptRun(name=point.name, values=dict(point.values), config_id=ids[point.name]) for point in plan.points
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = file.exists()
        if there:
            _check_same(file, runs)
        elif any(folder.iterdir()):
            raise RunError("the folder for the sweep is not empty", where=str(folder), help="name a new folder")
        else:
            content = {"schema": SCHEMA, "runs": [run.model_dump(mode="json") for run in runs]}
            durable.write_whole(file, json.dumps(content, indent=2) + "\n")
        with durable.claimed(file) as ours:
            if not ours:
                raise RunError("another process works on this sweep", where=str(folder), help="wait for it, or end it")
            yield there
    except OSError as error:
        why = write_fault(folder, error)
        raise RunError("the folder of the sweep cannot be used", where=str(folder), why=why) from error


def _check_same(file: Path, runs: tuple[SweptRun, ...]) -> None:
    try:
        earlier = {run.name: run for run in read_model(file, _SweepFile, _MOST_BYTES).runs}
    except BadFileError as error:
        raise RunError(
            "the file of the sweep cannot be used", where=str(file), why=f"it {error.strerror}", help="use a new folder"
        ) from None
    remedy = "pass the same file, values and seeds, or another folder"
    if list(earlier) != [run.name for run in runs]:
        why = f"it has {len(earlier)} runs, {_names(list(earlier))}; now there are {len(runs)}"
        raise RunError("the folder belongs to another sweep", where=str(file), why=why, help=remedy)
    changed = [run.name for run in runs if earlier[run.name].config_id != run.config_id]
    if changed:
        why = f"the configuration of {_names(changed)} is another one now: the file has changed"
        raise RunError("the folder belongs to another sweep", where=str(file), why=why, help=remedy)


def _names(names: list[str]) -> str:
    rest = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{rest}"


def states(folder: Path, plan: SweepPlan) -> dict[str, PointState]:
    """Return the progress of each run by name, from its newest run folder."""
    runs = sorted(all_runs(folder), key=lambda run: run.state.created)
    newest = {run.state.experiment: PointState(run, *run.state.outcome) for run in runs}
    return {point.name: newest.get(point.name, PointState(None, WAITING)) for point in plan.points}


def check_visible(folder: Path, current: Mapping[str, PointState]) -> None:
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
