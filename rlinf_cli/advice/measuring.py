"""`rlinf inspect placement --measure`: trials of a few steps with one process per component, recorded for advice."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer

from rlinf_cli import console
from rlinf_cli.advice.job_devices import JobDevices, devices_of
from rlinf_cli.advice.recorded_runs import MEASUREMENT, MEASUREMENT_SCHEMA, flow_of, read_runs
from rlinf_cli.command import Result
from rlinf_cli.console import shown
from rlinf_cli.interrupts import ExitCode, command_signals
from rlinf_cli.job.job_file import SoundJob, load, sound
from rlinf_cli.job.job_layout import lay_out
from rlinf_cli.run.driver import choose_cluster, refuse_elsewhere
from rlinf_cli.run.starting import check_installed
from rlinf_cli.run.sweep import LOGS, RunQueue
from rlinf_cli.run.sweep_plan import Point, PointState, SweepPlan, overrides_of
from rlinf_cli.runs.run_lookup import config_of
from rlinf_core import env_vars
from rlinf_core.config.diagnostics import Severity
from rlinf_core.config.sections.cluster import RESERVED_LABELS
from rlinf_core.errors import RLinfError, RunError
from rlinf_core.foreign.files import write_fault
from rlinf_core.job.arrangements import DeviceSpan
from rlinf_core.job.flow import CallRow, Durations, JobFlow
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.run_folder import unused_path
from rlinf_core.runners.storage.run_status import RunStatus
from rlinf_core.topology import CLUSTER_LABEL

_MOST_LISTED: Final = 6


class _Trial(NamedTuple):
    """A trial: its name, its accelerators (`now` or a kind), its size, and the values that it sets in the file."""

    name: str
    kind: str
    size: int
    values: Mapping[str, Any]

    @property
    def point(self) -> Point:
        """The trial as a queued run."""
        overrides = tuple(f"{key}={json.dumps(value)}" for key, value in self.values.items())
        return Point(self.name, {"on": self.kind, "size": str(self.size)}, overrides)


def measured(file: str, overrides: Sequence[str]) -> Result:
    """Run the trials of a job, and return the durations of its calls.

    Args:
        file: a file, or a run whose file is meant.
        overrides: the arguments of the command line: overrides of the file, and sizes, as in `env=160`.

    Raises:
        typer.BadParameter: a size names a component without selectable sizes, or the file is standard input.
        RLinfError: the job cannot be measured, or no trial finished.
    """
    if file == "-":
        raise typer.BadParameter("each trial reads the file again: give a path, not `-`", param_hint="'--measure'")
    name = config_of(file)
    sizes, kept = _sizes_among(overrides)
    job = load(name, kept)
    parts = sound(job)
    flow = flow_of(job)
    layout = lay_out(parts, "placement", file, arguments=kept)
    devices = devices_of(parts.cluster, parts.topology, layout.placements, flow.components)
    config: Any = job.config
    trials = _trials(flow, devices, parts, config.runner.staleness, sizes)
    refuse_elsewhere(parts, name, "and the trials would be written there", "measure")
    check_installed()
    choose_cluster(parts, name, already_shown=False)
    shared = [word for word in kept if not any(word.partition("=")[0].lstrip("+~") in trial.values for trial in trials)]
    place = unused_path(Path(config.runner.logger.log_path).absolute(), "measurement")
    plan = SweepPlan(name, tuple(shared), tuple(trial.point for trial in trials), place.parent, parts)
    plan, left_out = _valid(plan, place)
    left_out += [f"`{label}` was not measured: no component is placed there" for label in _unused(parts, devices)]
    ended, stalled = _run(plan, place)
    return _result(file, kept, place, ended, stalled, left_out)


def _sizes_among(overrides: Sequence[str]) -> tuple[dict[str, list[int]], list[str]]:
    """Return the sizes in the arguments, `COMPONENT=N,...`, by component, and the other arguments."""
    sizes: dict[str, list[int]] = {}
    kept: list[str] = []
    for override in overrides:
        key, _, text = override.partition("=")
        if "." in key or key.startswith(("~", "+")) or key == "recipe" or text.startswith("{"):
            kept.append(override)
            continue
        for part in f"{key}={text}".split(","):
            component, _, number = part.partition("=")
            if not number.isdecimal() or not int(number):
                message = f"`{part}` is no size: write COMPONENT=N, as `env=160`"
                raise typer.BadParameter(message, param_hint="'--measure'")
            sizes.setdefault(component, []).append(int(number))
    return sizes, kept


def _trials(
    flow: JobFlow, devices: JobDevices, parts: SoundJob, staleness: int, asked: Mapping[str, Sequence[int]]
) -> list[_Trial]:
    """Return a trial of each size on the present accelerators, and one trial on each other usable kind."""
    for name in devices.fixed:
        robot = parts.topology.group(_group_of(parts, name)).unit
        if robot is not None and robot.robot:
            what = f"`{name}` cannot be measured alone: it moves robots"
            raise RLinfError(what, help="give a run in which it was there: `--advise RUN`")
    now = devices.now(flow.components, flow.stages_now, staleness)
    usual = flow.trial_sizes(now)
    sizes = list(usual)
    for component, rows in asked.items():
        for number in rows:
            size = flow.trial_size(component, number, now) if component in flow.components else 0
            if not size:
                names = [one for one in flow.components if flow.trial_size(one, 1 << 20, now)]
                raise typer.BadParameter(
                    f"`{component}={number}`: sizes can be chosen for {', '.join(names)}", param_hint="'--measure'"
                )
            sizes.append(size)
    trials: list[_Trial] = []
    for size in dict.fromkeys(sizes):
        placed = _placed(flow, devices, parts, None)
        trials.append(_Trial(f"{len(trials) + 1:02d}-now-{size}", "now", size, {**placed, **flow.trial(size, now)}))
    for label in devices.kinds:
        placed = _placed(flow, devices, parts, label)
        if placed != _placed(flow, devices, parts, None):
            size = usual[len(usual) // 2]
            name = f"{len(trials) + 1:02d}-{label}-{size}"
            trials.append(_Trial(name, label, size, {**placed, **flow.trial(size, now)}))
    return trials


def _placed(flow: JobFlow, devices: JobDevices, parts: SoundJob, wanted: str | None) -> dict[str, Any]:
    """Return the placement of one process per component, on separate accelerators as far as there are enough.

    A component uses the kind `wanted` if it may, else its present kind.
    """
    values: dict[str, Any] = {}
    used: dict[str, int] = {}
    for name in flow.components:
        own = devices.seats[name].kind
        if own is None:
            values[f"cluster.component_placement.{name}"] = {"placement": "0", "node_group": _group_of(parts, name)}
            continue
        label = wanted if wanted is not None and wanted in devices.groups[name] else own
        rank = used.get(label, 0)
        used[label] = rank + 1
        seats = DeviceSpan(label, rank % devices.kinds[label].units, 1)
        values[f"cluster.component_placement.{name}"] = devices.placed(name, seats)
    return values


def _group_of(parts: SoundJob, name: str) -> str:
    return next(iter(parts.cluster.component_placement[name].node_group), CLUSTER_LABEL)


def _unused(parts: SoundJob, devices: JobDevices) -> list[str]:
    """Return the groups with accelerators whose nodes no component uses, for which there is no advice."""
    used = {rank for label in devices.kinds for rank in parts.topology.group(label).node_ranks}
    return [
        label
        for label, group in parts.topology.groups.items()
        if label not in RESERVED_LABELS
        and used.isdisjoint(group.node_ranks)
        and any(parts.topology.nodes[rank].num_accelerators for rank in group.node_ranks)
    ]


def _valid(plan: SweepPlan, place: Path) -> tuple[SweepPlan, list[str]]:
    """Return the plan without trials that the job's rules reject, and a sentence on each of those.

    Raises:
        RLinfError: the rules reject all trials.
    """
    points: list[Point] = []
    refused: list[str] = []
    for point in plan.points:
        job = load(plan.file, overrides_of(plan, point, place))
        if job.ok:
            points.append(point)
            continue
        finding = next(finding for finding in job.diagnostics if finding.severity is Severity.ERROR)
        refused.append(f"{point.name} was left out: {finding.message} [{finding.code}]")
    if not points:
        raise RLinfError("the job cannot be measured", where=plan.parts.name, why=refused[0])
    return plan._replace(points=tuple(points)), refused


def _run(plan: SweepPlan, place: Path) -> tuple[Mapping[str, PointState], set[str]]:
    """Run the trials one after the other; return their final states, and those ended for lack of progress."""
    content = {"schema": MEASUREMENT_SCHEMA, "trials": [point.name for point in plan.points]}
    try:
        place.mkdir(parents=True)
        durable.write_whole(place / MEASUREMENT, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        why = write_fault(place, error)
        raise RLinfError("the folder of the measurement cannot be written", where=str(place), why=why) from error
    console.message(f"{len(plan.points)} trials of one process a component, in {shown(place)}")
    before: dict[str, str] = {}

    def tell(current: Mapping[str, PointState]) -> None:
        for name, state in current.items():
            if state.status not in (before.get(name), "waiting"):
                console.message(f"{name}: {state.status}")
            before[name] = state.status

    # The user waits for advice, so a trial whose devices another job holds fails instead of waiting.
    queue = RunQueue(plan, place, 1, tell, waits=False, patience=env_vars.TIMEOUT.get())
    return queue.work(), queue.stalled


def _result(
    file: str,
    kept: Sequence[str],
    place: Path,
    ended: Mapping[str, PointState],
    stalled: set[str],
    left_out: Sequence[str],
) -> Result:
    ask = shlex.join(["rlinf", "inspect", "placement", file, *kept, "--advise", shown(place)])
    done = [name for name, state in ended.items() if state.status == RunStatus.FINISHED]
    if command_signals.code is not None:
        what = f"{len(done)} of {len(ended)} trials are in {shown(place)}"
        return Result(code=command_signals.code, notes=(f"{what}; advice by them: `{ask}`" if done else what,))
    rows: list[CallRow] = []
    failed: list[str] = []
    for name, state in ended.items():
        try:
            if state.status != RunStatus.FINISHED or state.run is None:
                still = f"no step ended for {env_vars.TIMEOUT.get():g} s" if name in stalled else ""
                raise RunError(f"{name} {state.status}: {still or state.reason or 'see its log'}")
            ((recorded, _),) = read_runs([str(state.run.path)], ())
            rows += [row for row in recorded.rows if row.component != "driver"]
        except RLinfError as error:
            failed.append(f"{error.message} ({shown(place / LOGS / name)}.log)")
    if len(failed) == len(ended):
        raise RLinfError("no trial finished", where=str(place), why=failed[0])
    durations = Durations.of(rows)
    cells = [
        (phase, model or "-", _listed(_sizes(rows, phase, model)), f"{line.fix:.4g}", f"{line.slope:.3g}")
        for phase, models in durations.phases.items()
        for model, line in models.items()
        if line.rows[1]
    ]
    record = {
        "schema": MEASUREMENT_SCHEMA,
        "folder": str(place),
        "trials": {name: state.status for name, state in ended.items()},
        "left_out": [*left_out, *failed],
        "phases": [
            {"phase": phase, "model": model, "rows": _sizes(rows, phase, model), "fix": line.fix, "slope": line.slope}
            for phase, models in durations.phases.items()
            for model, line in models.items()
        ],
    }

    def text() -> str:
        table = console.table(("phase", "on", "rows measured", "fixed s", "s a row"), cells, right=(3, 4), keep=(0,))
        return "\n".join([table, *left_out, *failed])

    code = ExitCode.FAILED if failed else ExitCode.OK
    return Result(text, record, code, (f"advice by it: `{ask}`",))


def _sizes(rows: Sequence[Any], phase: str, model: str) -> list[float]:
    return sorted({round(row.rows, 1) for row in rows if (row.phase, row.model) == (phase, model)})


def _listed(sizes: Sequence[float]) -> str:
    few = len(sizes) <= _MOST_LISTED
    return ", ".join(f"{size:g}" for size in sizes) if few else f"{sizes[0]:g} to {sizes[-1]:g}"
