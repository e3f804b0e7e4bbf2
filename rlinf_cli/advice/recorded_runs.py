"""The records of runs and measurements on which advice is based."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, pstdev
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import typer
from pydantic import Field

from rlinf_cli.advice.job_devices import UNNAMED, JobDevices, devices_of
from rlinf_cli.command import Result
from rlinf_cli.console import shown
from rlinf_core.errors import ConfigError, RLinfError, RunError
from rlinf_core.foreign.files import FileModel, Name, read_model
from rlinf_core.job.arrangements import Arrangement
from rlinf_core.job.flow import TRIAL, CallRow, Durations, JobFlow, steady_or_spread
from rlinf_core.process import pacing
from rlinf_core.process.pacing import Pace, Pacing
from rlinf_core.runners.metrics import CallsOfSize, RunProfile, read_metrics, read_profile
from rlinf_core.runners.storage.run_status import RunStatus

if TYPE_CHECKING:
    from rlinf_core.job.load import Job
    from rlinf_core.runners.storage.run_folder import RunFolder


MEASUREMENT: Final = "measurement.json"
MEASUREMENT_SCHEMA: Final = "rlinf.measurement/1"


class _MeasurementFile(FileModel):
    schema_: Annotated[Literal["rlinf.measurement/1"], Field(alias="schema")]
    trials: tuple[Name, ...] = Field(strict=False)


def trials_of(folder: Path) -> list[Path] | None:
    """Return the finished and recorded runs of a measurement; None if `folder` is not a measurement's.

    Raises:
        RLinfError: no trial finished.
    """
    from rlinf_cli.runs.run_lookup import all_runs

    try:
        names = read_model(folder / MEASUREMENT, _MeasurementFile).trials
    except (FileNotFoundError, NotADirectoryError):
        return None
    runs = [
        run.path
        for run in all_runs(folder)
        if run.state.experiment in names and run.state.status == RunStatus.FINISHED and run.profile_file.exists()
    ]
    if not runs:
        raise RLinfError("no trial of the measurement finished", where=str(folder), help="measure again")
    return runs


# The first steps, which warm up, are ignored, and so are as many last steps as rollouts ran ahead. At least
# `_FEWEST_STEPS` must remain.
_FIRST: Final = 1
_FEWEST_STEPS: Final = 3
# The fewest calls of a phase, of any size, that determine its duration.
_FEWEST_CALLS: Final = 4


class RecordedRun(NamedTuple):
    """The record of a run.

    Attributes:
        name: its name.
        devices: the accelerators of its components.
        arrangement: its placement, with stages and staleness.
        rows: its calls.
        sizes: the sizes of its items, such as tokens of answers: pairs of size and number, by phase.
        phases: the medians over the steps of the metrics `time/...`, in seconds, and `agent/...`.
        deviation: the standard deviation of a step, in seconds.
        load, cpus: the load of the driver's machine at the end, and its number of processors.
        recipe: its recipe.
    """

    name: str
    devices: JobDevices
    arrangement: Arrangement
    rows: list[CallRow]
    sizes: dict[str, list[tuple[float, int]]]
    phases: dict[str, float]
    deviation: float
    load: float
    cpus: int
    recipe: str = ""

    @property
    def models(self) -> dict[str, str]:
        """The model of the accelerators of each kind."""
        return self.devices.models

    @property
    def busy(self) -> bool:
        """Whether the machine's load exceeded its processors."""
        return self.load > self.cpus


def read_runs(names: Sequence[str], assume: Sequence[str]) -> list[tuple[RecordedRun, JobFlow]]:
    """Return the records of runs, each with the flow of its job.

    Args:
        names: the names or folders of runs or of measurements, which hold several runs.
        assume: assumptions about accelerators; those about groups that a run lacks are ignored.

    Raises:
        RunError: a run does not exist, has too few steps, or has no `profile.json`.
        RLinfError: the recipe gives no advice, or the model does not cover the placement.
    """
    return [_read_run(run, assume) for name in dict.fromkeys(names) for run in _runs_of(name)]


def _runs_of(name: str) -> list[str]:
    from rlinf_cli.runs.run_lookup import runs_folder

    for folder in (Path(name), runs_folder() / name):
        trials = trials_of(folder)
        if trials is not None:
            return [str(trial) for trial in trials]
    return [name]


def _read_run(name: str, assume: Sequence[str]) -> tuple[RecordedRun, JobFlow]:
    from rlinf_cli.job.job_file import as_recorded, load, sound
    from rlinf_cli.job.job_layout import lay_out
    from rlinf_cli.runs.run_lookup import find_run_folder

    folder = find_run_folder(name)
    if folder is None:
        raise RunError(f"there is no run `{name}`", help="`rlinf runs` lists them")
    if folder.state.kind != "training":
        raise RunError(f"run `{name}` is a rehearsal", why="it repeats what others recorded", help="give those")
    job = as_recorded(load(str(folder.config_file), None, assume))
    parts = sound(job)
    flow = flow_of(job)
    layout = lay_out(parts, "placement", str(folder.config_file))
    devices = devices_of(parts.cluster, parts.topology, layout.placements, flow.components)
    config: Any = job.config
    arrangement = devices.now(flow.components, flow.stages_now, config.runner.staleness)
    profile = _profile(folder.path)
    lines = [line.metrics for line in read_metrics(folder.metrics_file) if "time/step" in line.metrics]
    kept = lines[_FIRST : len(lines) - config.runner.staleness]
    if len(kept) < _FEWEST_STEPS:
        raise RunError(
            f"run `{name}` has too few steps to say how long one takes: {len(lines)}",
            help=f"let it run for {_FIRST + config.runner.staleness + _FEWEST_STEPS} steps",
        )
    names = {key for metrics in kept for key in metrics if key.startswith(("time/", "agent/"))}
    phases = {key: median([metrics[key] for metrics in kept if key in metrics]) for key in names}
    deviation = pstdev([metrics["time/step"] for metrics in kept])
    calls = Counter[str]()
    for row in profile.rows:
        calls[row.phase] += row.calls
    often = [row for row in profile.rows if row.quantiles and calls[row.phase] >= _FEWEST_CALLS]
    rows = [_call(row, devices, arrangement) for row in often]
    sizes: dict[str, list[tuple[float, int]]] = {}
    for row in profile.rows:
        if not row.quantiles:
            sizes.setdefault(row.phase, []).append((row.rows, row.calls))
    recorded = RecordedRun(
        folder.path.name,
        devices,
        arrangement,
        rows,
        sizes,
        phases,
        deviation,
        profile.load,
        profile.cpus,
        folder.state.recipe,
    )
    return recorded, flow


def fitted(
    recorded: Sequence[tuple[RecordedRun, JobFlow]],
) -> tuple[Durations, dict[str, list[tuple[float, int]]]]:
    """Return the durations fitted to the calls of runs, and the sizes of their items, by phase."""
    rows = [row for run, flow in recorded for row in flow.calls(run)]
    calls = Durations.of(rows)
    constants = [row for run, flow in recorded for row in flow.constants(run, calls)]
    sizes: dict[str, list[tuple[float, int]]] = {}
    for run, _ in recorded:
        for phase, listed in run.sizes.items():
            sizes.setdefault(phase, []).extend(listed)
    return Durations.of([*rows, *constants]), sizes


def flow_of(job: Job) -> JobFlow:
    """Return the flow of a job's recipe.

    Raises:
        RLinfError: the recipe has no flow.
    """
    flow = None if job.recipe is None else job.recipe.load(job.recipe.flow)
    if flow is None:
        what = "a file without a recipe" if job.recipe is None else f"recipe `{job.recipe.name}`"
        raise RLinfError(
            f"{what} gives no advice on its placement",
            help="compare runs of a few steps of each placement: `time/step` in their metrics",
        )
    return flow(job.config)


def _profile(folder: Path) -> RunProfile:
    file = folder / "profile.json"
    try:
        return read_profile(file)
    except FileNotFoundError:
        help = "runs write it after their first and their last step; an older run has none"
        raise RunError(f"run `{folder.name}` has no record of its calls", where=str(file), help=help) from None
    except OSError as error:
        raise RunError("the record of calls cannot be read", where=str(file), why=error.strerror) from error


def _call(row: CallsOfSize, devices: JobDevices, arrangement: Arrangement) -> CallRow:
    seats = devices.seats.get(row.component)
    kind = None if seats is None or seats.kind is None else devices.kinds[seats.kind]
    together = arrangement.staleness > 0 or arrangement.stages > 1
    shared = (
        together
        and seats is not None
        and any(seats.overlaps(other) for name, other in arrangement.seats if name != row.component)
    )
    middle = sorted(row.quantiles)[len(row.quantiles) // 2]
    model = "" if kind is None else kind.model or UNNAMED
    spread = steady_or_spread(row.quantiles)
    return CallRow(row.component, row.phase, row.rows, model, row.calls, middle, spread, shared)


_STEPS: Final = 8
# The component of rows that a flow derives from whole runs.
DRIVER: Final = "driver"
# Keys of a trial that a rehearsal takes from the file or sets itself.
_OWN: Final = frozenset(("runner.max_steps", "runner.max_staleness"))


def rehearse(file: str, overrides: Sequence[str], names: Sequence[str]) -> Result | int:
    """Run a job with stand-ins, and return the predicted and the measured seconds of a step.

    Args:
        file, overrides: the arguments of the command line.
        names: the runs or measurements with the durations; by default the newest run of the recipe with a record.

    Raises:
        typer.BadParameter: the file is standard input, or a key has several values.
        RLinfError: the job cannot be rehearsed.
    """
    from rlinf_cli.job.job_file import load, sound
    from rlinf_cli.job.job_layout import lay_out
    from rlinf_cli.run.driver import refuse_elsewhere
    from rlinf_cli.run.starting import start
    from rlinf_cli.run.sweep_plan import several

    if file == "-":
        raise typer.BadParameter("the file is read several times: give a path, not `-`", param_hint="'--rehearse'")
    if swept := several(file, overrides):
        raise typer.BadParameter(f"`{swept[0]}`: rehearse one value after the other", param_hint="'--rehearse'")
    job = load(file, overrides)
    parts = sound(job)
    flow = flow_of(job)
    refuse_elsewhere(parts, file, "where the record is not", "rehearse")
    config: Any = job.config
    if config.runner.only_eval:
        raise ConfigError(
            "the job has no steps of training that could be rehearsed",
            where=parts.name,
            why="`runner.only_eval` is true",
            help="rehearse it with `runner.only_eval=false`",
        )
    layout = lay_out(parts, "placement", file, arguments=overrides)
    devices = devices_of(parts.cluster, parts.topology, layout.placements, flow.components)
    recipe = job.recipe.name if job.recipe else ""
    recorded = read_runs(names or [_newest(parts.name, recipe)], ())
    for run, _ in recorded:
        if run.recipe != recipe:
            raise RunError(
                f"run `{run.name}` is one of recipe `{run.recipe}`, and the file is of `{recipe}`",
                help="give runs of the same recipe",
            )
    durations, sizes = fitted(recorded)
    paced = _pacing(flow, devices, recorded, durations, sizes)
    now = devices.now(flow.components, flow.stages_now, config.runner.staleness)
    predicted = flow.flow(durations, devices.models, sizes).simulate(now).seconds
    logger = config.runner.logger
    experiment = f"rehearsal-{logger.experiment_name or config.recipe}"
    # With rollouts that run ahead, long and short steps may alternate, so more are needed.
    most = f"runner.max_steps={_STEPS * (1 + config.runner.staleness)}"
    steps = next((word for word in overrides if word.startswith("runner.max_steps=")), most)
    trial = {key: value for key, value in TRIAL.items() if key not in _OWN}
    replaced = {*trial, "runner.max_steps"}
    words = [*(word for word in overrides if word.partition("=")[0].lstrip("+~") not in replaced), steps]
    words += [f"{key}={json.dumps(value)}" for key, value in trial.items()]
    words += [*flow.rehearsal(), f"runner.logger.experiment_name={experiment}"]
    pacing.want(paced)
    try:
        ended = start(file, words, None, dry_run=False, detach=False)
    finally:
        pacing.want(None)
    folder = _own_folder(Path(logger.log_path), experiment)
    if ended or folder is None:
        return ended
    return _result(folder, predicted, config.runner.staleness, [run.name for run, _ in recorded])


def _own_folder(log_path: Path, experiment: str) -> RunFolder | None:
    """Return the newest folder that this process made, since others may rehearse the same job."""
    from rlinf_cli.runs.run_lookup import all_runs

    made = [run for run in all_runs(log_path) if run.state.experiment == experiment and run.state.pid == os.getpid()]
    return max(made, key=lambda run: run.state.created, default=None)


def _newest(file: str, recipe: str) -> str:
    """Return the folder of the newest run of a recipe that has a record.

    Raises:
        RunError: there is none.
    """
    from rlinf_cli.runs.run_lookup import all_runs

    runs = [
        run
        for run in all_runs()
        if run.state.recipe == recipe and run.state.kind == "training" and run.profile_file.exists()
    ]
    if not runs:
        measure = shlex.join(["rlinf", "inspect", "placement", file, "--measure"])
        help = f"name one, or measure: `{measure}`"
        raise RunError(f"no run of recipe `{recipe}` tells how long its work takes", help=help)
    return str(max(runs, key=lambda run: run.state.created).path)


def _pacing(
    flow: JobFlow,
    devices: JobDevices,
    recorded: Sequence[tuple[RecordedRun, JobFlow]],
    durations: Durations,
    sizes: dict[str, list[tuple[float, int]]],
) -> Pacing:
    """Return the durations of a job's calls on the accelerators of their components.

    Raises:
        RLinfError: a component was not recorded on the accelerators that it has.
    """
    owners = {row.phase: row.component for run, _ in recorded for row in run.rows if row.component != DRIVER}
    paces: dict[str, Pace] = {}
    for phase, owner in owners.items():
        needed = any(phase in phases for phases in flow.phases.values())
        seats = devices.seats.get(owner)
        model = "" if seats is None or seats.kind is None else devices.models[seats.kind]
        line = durations.of_phase(phase, model)
        if line is None and needed:
            where = f"`{owner}` on {model}" if model else f"`{owner}` without an accelerator"
            raise RLinfError(f"{where} was never seen by these runs", help="give a run in which it was there")
        # A phase without rows only contains other phases, or waits, and needs no stand-in.
        if line is not None and (line.rows[1] or phase.endswith("/move")):
            paces[phase] = Pace(line.fix, line.slope, line.spread)
    # The flow has derived the other values that stand-ins need, such as the turns of a conversation, from whole runs.
    derived = {
        phase: ((models[""].at(0), 1),) for phase, models in durations.phases.items() if phase.startswith(f"{DRIVER}/")
    }
    return Pacing(paces, {**{phase: tuple(listed) for phase, listed in sizes.items()}, **derived})


def _result(folder: RunFolder, predicted: float, staleness: int, runs: Sequence[str]) -> Result:
    seconds = [line.metrics["time/step"] for line in read_metrics(folder.metrics_file) if "time/step" in line.metrics]
    # While the first step waited for its samples, the samples of the following steps already arrived.
    kept = seconds[1 + staleness : len(seconds) - staleness]
    if not kept:
        help = "give a larger `runner.max_steps`"
        raise RunError("the rehearsal had too few steps", where=str(folder.path), help=help)
    measured = mean(kept)
    record = {
        "schema": "rlinf.rehearsal/1",
        "folder": str(folder.path),
        "runs": list(runs),
        "predicted": round(predicted, 4),
        "rehearsed": round(measured, 4),
        "steps": len(kept),
    }
    text = f"{predicted:.3g} s a step predicted, {measured:.3g} s rehearsed, over {len(kept)} steps of "
    text += shown(folder.path)
    return Result(text, record, notes=("stand-ins did the work: nothing was trained, and nothing saved",))
