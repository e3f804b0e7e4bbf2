"""`rlinf train --rehearse`: a job with stand-ins that take as long as its recorded work."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

import typer

from rlinf_cli.advice.job_devices import devices_of
from rlinf_cli.advice.recorded_runs import fitted, flow_of, read_runs
from rlinf_cli.command import Result
from rlinf_cli.console import shown
from rlinf_core.advice.durations import Durations
from rlinf_core.advice.job_flow import TRIAL
from rlinf_core.errors import ConfigError, RLinfError, RunError
from rlinf_core.process import pacing
from rlinf_core.process.pacing import Pace, Pacing
from rlinf_core.runners.metrics import read_metrics

if TYPE_CHECKING:
    from rlinf_cli.advice.job_devices import JobDevices
    from rlinf_cli.advice.recorded_runs import RecordedRun
    from rlinf_core.advice.job_flow import JobFlow
    from rlinf_core.runners.storage.run_folder import RunFolder

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
    from rlinf_cli.placement.job_layout import lay_out
    from rlinf_cli.run.remote_driver import refuse_elsewhere
    from rlinf_cli.run.starting import start
    from rlinf_cli.sweep.plan import several

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
