"""The advice of `rlinf inspect placement --advise`: the fastest placements of a job, from the records of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rlinf_cli.advice.job_devices import FreeDevices, JobDevices, devices_of
from rlinf_cli.advice.recorded_runs import RecordedRun, fitted, flow_of
from rlinf_cli.job.job_file import SoundJob
from rlinf_cli.job.job_layout import JobLayout
from rlinf_cli.memory import HasPlace, node_memory, node_needs
from rlinf_core.config.diagnostics import Diagnostic
from rlinf_core.errors import RLinfError
from rlinf_core.job.arrangements import (
    Arrangement,
    DeviceGroup,
    DeviceSpan,
    Ranked,
    SearchResult,
    candidates,
    search,
)
from rlinf_core.job.flow import Durations, JobFlow
from rlinf_core.job.recipe import ProcessForecast

if TYPE_CHECKING:
    from rlinf_core.job.load import Job

# The number of fastest placements to find.
_TOP: Final = 10
# Times that differ by a smaller fraction are equal: down to this difference, predictions ranked placements correctly.
TIE: Final = 0.03


class Judged(NamedTuple):
    """A placement and the estimate of its step.

    Attributes:
        ranked: the arrangement, its bound and its simulation.
        low, high: the range of a step's seconds.
        unseen: call sizes outside the records, as in `160 rows of env/step (seen: 40 to 80)`.
    """

    ranked: Ranked
    low: float
    high: float
    unseen: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return self.ranked.step.seconds


@dataclass(frozen=True)
class Advice:
    """The advice on a job.

    Attributes:
        flow, devices: the flow of the job, and its accelerators.
        runs: the runs on which it is based.
        durations: the durations fitted to their records.
        now: the present placement.
        best: the fastest placements, fastest first.
        result: the result of the search.
        refused: sentences on the placements that could not be judged.
        faults: one finding for each of the fastest placements that the job's rules reject.
        free: the free accelerators, if only these may be used; else None.
    """

    flow: JobFlow
    devices: JobDevices
    runs: Sequence[RecordedRun]
    durations: Durations
    now: Judged
    best: Sequence[Judged]
    result: SearchResult
    refused: Sequence[str]
    faults: Sequence[Diagnostic] = ()
    free: FreeDevices | None = None

    @property
    def blocked(self) -> bool:
        """Whether another job holds an accelerator of the present placement."""
        return self.free is not None and self.free.blocks(self.now.ranked.arrangement)

    @property
    def change(self) -> Judged | None:
        """The fastest placement, if it is surely faster than the present one or that is blocked; else None."""
        best = self.best[0] if self.best else None
        return best if best is not None and (self.blocked or best.high < self.now.low) else None

    @property
    def leaner(self) -> Judged | None:
        """The placement on the fewest accelerators, fewer than now, that is about as fast as now or faster; or None."""
        equal = [
            judged
            for judged in self.best
            if judged.seconds <= self.now.seconds * (1 + TIE)
            and judged.ranked.arrangement.accelerators < self.now.ranked.arrangement.accelerators
        ]
        return min(equal, key=lambda judged: judged.ranked.arrangement.accelerators, default=None)


def advise(
    job: Job,
    parts: SoundJob,
    layout: JobLayout,
    recorded: Sequence[tuple[RecordedRun, JobFlow]],
    staleness: int | None,
    free: Callable[[JobDevices], FreeDevices] | None = None,
) -> Advice:
    """Return the advice on a job.

    Args:
        job, parts, layout: the job, and the placement of its processes.
        recorded: the records of runs, each with the flow of its job.
        staleness: the maximum number of steps that rollouts may run ahead; None: the file's.
        free: a function that returns the usable accelerators; None: all.

    Raises:
        RLinfError: the recipe gives no advice, or no run recorded a needed phase.
    """
    flow = flow_of(job)
    devices = devices_of(parts.cluster, parts.topology, layout.placements, flow.components)
    durations, sizes = fitted(recorded)
    config: Any = job.config
    choices, refused = _choices(flow, devices, durations)
    limit = config.runner.staleness if staleness is None else staleness
    timed = flow.flow(durations, devices.models, sizes)
    today = devices.now(flow.components, flow.stages_now, config.runner.staleness)
    fits = _fitting(job, parts, layout, devices)
    usable = None if free is None else free(devices)
    arrangements = candidates(timed, _on_free(choices, usable), flow.stages, range(limit + 1), flow.legal)
    if usable is not None:
        arrangements = (_moved(arrangement, usable) for arrangement in arrangements)
    result = search(timed, arrangements, top=_TOP, fits=fits)
    low, high = (flow.flow(extreme, devices.models, sizes) for extreme in durations.extremes())

    def judged(ranked: Ranked) -> Judged:
        where = ranked.arrangement
        unseen = tuple(_unseen(flow, where, devices, durations))
        error = min(0.9, durations.error * (2 if unseen else 1))
        ends = [low.simulate(where).seconds, high.simulate(where).seconds] if durations.one_sized() else []
        ends.append(ranked.step.seconds)
        return Judged(ranked, min(ends) * (1 - error), max(ends) * (1 + error), unseen)

    now = judged(Ranked(today, timed.bound(today), timed.simulate(today)))
    runs_read = [run for run, _ in recorded]
    return Advice(
        flow, devices, runs_read, durations, now, list(map(judged, result.best)), result, refused, free=usable
    )


def _choices(
    flow: JobFlow, devices: JobDevices, durations: Durations
) -> tuple[dict[str, list[DeviceGroup] | DeviceSpan], list[str]]:
    """Return the accelerator groups that each component may use, and sentences on those without a record.

    Raises:
        RLinfError: a component was not recorded on the accelerators that it has now.
    """
    choices: dict[str, list[DeviceGroup] | DeviceSpan] = {}
    refused: list[str] = []
    for name in flow.components:
        own = devices.seats[name]
        kinds = devices.kinds_for(name)
        for label, model in [(own.kind, "")] if own.kind is None else [(kind.label, kind.model) for kind in kinds]:
            missing = [phase for phase in flow.phases[name] if durations.of_phase(phase, model) is None]
            if not missing:
                continue
            where = f"`{name}` on {model}" if model else f"`{name}` without an accelerator"
            if label == own.kind:
                seen = ", ".join(durations.phases.get(missing[0], {})) or "nowhere"
                raise RLinfError(
                    f"{where} was never seen by these runs",
                    why=f"`{missing[0]}` was recorded on: {seen}",
                    help="give a run in which it was there, as in `--advise RUN,RUN`, or `--measure` it",
                )
            kinds = [kind for kind in kinds if kind.label != label]
            refused.append(f"{where} was never seen: give a run in which it was there, or `--measure` it")
        choices[name] = own if own.kind is None else kinds
    return choices, refused


def _on_free(
    choices: Mapping[str, list[DeviceGroup] | DeviceSpan], free: FreeDevices | None
) -> Mapping[str, list[DeviceGroup] | DeviceSpan]:
    """Return the groups, reduced to the size of their longest free range."""
    if free is None:
        return choices
    return {
        name: kinds
        if isinstance(kinds, DeviceSpan)
        else [kind._replace(units=len(free.ranges[kind.label])) for kind in kinds if free.ranges[kind.label]]
        for name, kinds in choices.items()
    }


def _moved(arrangement: Arrangement, free: FreeDevices) -> Arrangement:
    """Return an arrangement, in which free accelerators count from 0, with the ranks of these accelerators."""
    seats = tuple(
        (name, own if own.kind is None else own._replace(first=own.first + free.ranges[own.kind].start))
        for name, own in arrangement.seats
    )
    return replace(arrangement, seats=seats)


def _unseen(flow: JobFlow, where: Arrangement, devices: JobDevices, durations: Durations) -> list[str]:
    owners = {phase: name for name, phases in flow.phases.items() for phase in phases}
    unseen: list[str] = []
    for phase, rows in flow.rows(where).items():
        kind = where.of(owners[phase]).kind
        duration = durations.of_phase(phase, "" if kind is None else devices.models[kind])
        if duration is not None and duration.extrapolates(rows):
            least, most = duration.rows
            seen = f"{least:g}" if least == most else f"{least:g} to {most:g}"
            unseen.append(f"{rows:g} rows of {phase} (seen: {seen})")
    return unseen


def _fitting(job: Job, parts: SoundJob, layout: JobLayout, devices: JobDevices) -> Callable[[Arrangement], bool]:
    """Return a function that tells whether an arrangement fits into the declared memory; unknown memory fits all."""
    nodes = range(len(parts.topology.nodes))
    limits = {rank: node_memory(parts.cluster, rank, available=None, here=None) for rank in nodes}
    known = any(limit.host is not None or limit.accelerator is not None for limit in limits.values())
    forecast = job.recipe.load(job.recipe.memory) if job.recipe is not None and known else None
    if forecast is None:
        return lambda arrangement: True

    @cache
    def forecasts(counts: tuple[tuple[str, int], ...]) -> Sequence[ProcessForecast]:
        return forecast(job.config, dict(counts))

    def fits(arrangement: Arrangement) -> bool:
        placements: dict[str, Sequence[HasPlace]] = dict(layout.placements)
        for name, seats in arrangement.seats:
            if seats.kind is not None:
                placements[name] = devices.places(seats, parts.topology)
        made = forecasts(tuple((name, len(processes)) for name, processes in placements.items()))
        needs = node_needs(made, placements, in_turns=not arrangement.staleness)
        return all(limits[rank].holds(*need) for rank, need in needs.items())

    return fits
