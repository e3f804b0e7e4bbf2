"""The facts about a run, read from its folder with type checks and size limits, and its incidents in order.

No file of the folder is executed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple, TypeVar, cast

from rlinf_cli.live.labels import phase_words
from rlinf_cli.runs.documents import PLACEMENT, recorded_places
from rlinf_cli.runs.logs import DRIVER, last_lines
from rlinf_cli.runs.metric_columns import (
    ComponentWait,
    LengthTail,
    MetricColumn,
    RunSeries,
    Units,
    series_of,
    tail_of,
    waits_of,
)
from rlinf_cli.runs.run_lookup import damaged_checkpoints
from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import load_source, read, split_components
from rlinf_core.config.tree import to_data
from rlinf_core.errors import RunError
from rlinf_core.foreign.files import BadFileError, read_bounded
from rlinf_core.node.process_life import kernel_lines
from rlinf_core.process.proc import boot_id
from rlinf_core.runners.events import EVALUATE
from rlinf_core.runners.metrics import EVALUATION_TIME, metrics_in, read_profile
from rlinf_core.runners.step_clock import FIRST_LOOK, NO_STEP, SLOW, STEPS
from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.checkpoint import GLANCE
from rlinf_core.runners.storage.first_contact import ContactCheck, read_comparisons
from rlinf_core.runners.storage.run_events import (
    EVIDENCE,
    FAILURE,
    Bundle,
    FailedProcess,
    QuarantinedItem,
    RunEvent,
    read_bundles,
    read_quarantine,
    story_with_faults,
)
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import RunState
from rlinf_core.runners.storage.run_status import RunStatus
from rlinf_core.scalars import plain

T = TypeVar("T")
# The most bytes of a metrics file that are read, from its end.
MOST_METRICS_BYTES: Final = 64 << 20
_MOST_CONFIG_BYTES: Final = 4 << 20
_TAIL_LINES: Final = 40
_PROGRESS: Final = f" INFO [{DRIVER}] "


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run that rules use.

    Attributes:
        path: the run folder.
        status, reason: the outcome of the run, also if its process could not write the outcome.
        step: the last finished step.
        story: the events of the run.
        bundles: the evidence, oldest first.
        columns: the metrics by name.
        config: the values of the configuration by key path.
        checks: the comparisons of the first contact.
        notes: messages about files that could not be read.
        moments: the time at which each line of the metrics was written, in seconds since 1970.
        looked: the time at which the folder was read.
        driver_end: lines on the end of a vanished driver: a restart of the machine, or lines of its kernel log.
        warnings: the warnings in the driver's log after the last finished step.
        evaluates: whether the driver was evaluating when it last logged its progress.
        quarantined: the items that were set aside, by file.
        has_checkpoint: whether there is a checkpoint to continue from.
        waits: the waits between components in the newest steps, longest first.
        tail: the tail of the answer lengths; None if there are too few answers.
        held_up: the processes that hold up an active run, see `supervision.verdicts`; empty if they were not asked.
    """

    path: Path
    status: str
    reason: str
    step: int = 0
    ended: float | None = None
    story: Sequence[RunEvent] = ()
    bundles: Sequence[Bundle] = ()
    columns: Mapping[str, MetricColumn] = field(default_factory=dict[str, MetricColumn])
    config: Mapping[str, object] = field(default_factory=dict[str, object])
    checks: Sequence[ContactCheck] = ()
    notes: Sequence[str] = ()
    moments: Sequence[float] = ()
    looked: float = 0.0
    driver_end: Sequence[str] = ()
    warnings: Sequence[str] = ()
    evaluates: bool = False
    quarantined: Mapping[str, QuarantinedItem] = field(default_factory=dict[str, "QuarantinedItem"])
    held_up: Sequence[str] = ()
    has_checkpoint: bool = True
    waits: Sequence[ComponentWait] = ()
    tail: LengthTail | None = None

    def column(self, *names: str) -> MetricColumn:
        """Return the first of the named metrics that the run has, else an empty column."""
        return next((self.columns[name] for name in names if name in self.columns), MetricColumn())

    def number(self, key: str) -> float | None:
        """Return a value of the configuration if it is a number, else None."""
        value = self.config.get(key)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def text(self, key: str) -> str | None:
        """Return a value of the configuration if it is text, else None."""
        value = self.config.get(key)
        return value if isinstance(value, str) else None


def read_facts(folder: RunFolder, series: RunSeries | None = None) -> RunFacts:
    """Return the facts about a run; add a note for each file that cannot be read.

    Args:
        series: the run's metrics, if they were read already.
    """
    status, reason = folder.state.outcome
    story, notes = story_with_faults(folder.path)
    bundles, faults = read_bundles(folder.path)
    notes += [*faults, *damaged_checkpoints(folder, GLANCE)]
    state = folder.state
    series = _metrics(folder.metrics_file, notes) if series is None else series
    calls = read_or_note(lambda: read_profile(folder.profile_file).rows, (), notes)
    units = read_or_note(lambda: _units(folder.path / PLACEMENT), {}, notes)
    driver_log = last_lines(folder.log_file(DRIVER, 0), _TAIL_LINES)
    return RunFacts(
        path=folder.path,
        status=status,
        reason=reason,
        step=state.step,
        ended=state.ended,
        story=story,
        bundles=bundles,
        columns=series.columns,
        config=read_config(folder.config_file, notes),
        checks=read_comparisons(folder.path),
        quarantined=read_quarantine(folder.path),
        notes=notes,
        moments=series.times,
        looked=time.time(),
        driver_end=_driver_end(state) if status == RunStatus.FAILED and state.status == RunStatus.RUNNING else (),
        warnings=_warnings(driver_log),
        evaluates=_evaluates(driver_log),
        # `damaged_checkpoints` notes why.
        has_checkpoint=read_or_note(folder.checkpoints.latest, None, []) is not None,
        waits=waits_of(series.finite, calls, units),
        tail=tail_of(series.finite, calls),
    )


def read_or_note(read: Callable[[], T], otherwise: T, notes: list[str], *, missing: bool = False) -> T:
    """Return the result of `read`; if it fails, add a note and return `otherwise`. A missing file is only noted with
    `missing`."""
    try:
        return read()
    except OSError as error:
        if missing or not isinstance(error, FileNotFoundError):
            why = f"it {error.strerror}" if isinstance(error, BadFileError) else error.strerror
            notes.append(f"{Path(error.filename or '').name} cannot be read: {why}")
    except RunError as error:
        notes.append(f"{error.message}: {error.why}" if error.why else error.message)
    return otherwise


def _units(file: Path) -> Units:
    """Return the accelerators, or else the nodes, of each component of a run."""
    return {
        name: {(one.cluster_node_rank, unit) for one in placed for unit in one.local_accelerator_ranks or (None,)}
        for name, placed in recorded_places(file).items()
    }


def _driver_end(state: RunState) -> list[str]:
    """Return lines on the end of a driver that could not write its end, from this machine's boot and kernel log."""
    process = state.process
    if process.boot != boot_id():
        return [f"{process.host} was restarted since: the kernel's boot is another one than the driver's"]
    ticks = process.start.rpartition(":")[2]
    since = int(ticks) / os.sysconf("SC_CLK_TCK") if ticks.isdigit() else math.inf
    return [f"kernel: {line}" for line in kernel_lines([process.pid], since)]


def _warnings(lines: Sequence[str]) -> list[str]:
    """Return the warnings at the end of a driver's log, after its last line of progress, each once."""
    newest = takewhile(lambda line: _PROGRESS not in line, reversed(lines))
    texts = [text for line in newest if (text := line.partition(f" WARNING [{DRIVER}] ")[2])]
    return list(dict.fromkeys(reversed(texts)))


def _evaluates(lines: Sequence[str]) -> bool:
    newest = next((line for line in reversed(lines) if _PROGRESS in line), "")
    # The progress within the evaluation may follow a comma.
    return any(f"{phase_words(EVALUATE)}{mark} " in newest for mark in (" for", ","))


def _metrics(path: Path, notes: list[str]) -> RunSeries:
    """Return the metrics of a run; read only the end of a very large file."""
    with suppress(OSError):
        if path.stat().st_size > MOST_METRICS_BYTES:
            notes.append(f"of {path.name}, which is larger than {MOST_METRICS_BYTES >> 20} MiB, the end was read")
    return read_or_note(lambda: series_of(metrics_in(path).last(MOST_METRICS_BYTES)), RunSeries(), notes)


def read_config(path: Path, notes: list[str]) -> Mapping[str, object]:
    """Return the values of a run's `config.yaml` by path; if it cannot be read, add the reason to `notes`."""
    diagnostics = Diagnostics()
    content = read_or_note(lambda: read_bounded(path, _MOST_CONFIG_BYTES), None, notes)
    if content is None:
        return {}
    source = load_source("-", diagnostics, stdin=content)
    tree = read(source, diagnostics) if source is not None else None
    # An earlier version of rlinf wrote keys such as `actor,env`.
    split = None if tree is None else split_components(tree, (), diagnostics)
    if split is None:
        notes.append(f"{path.name} cannot be read: {next(iter(diagnostics)).message}")
        return {}
    return dict(_leaves(plain(to_data(split)), ""))


def _leaves(data: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield every value by its path, as in `data.val_data_paths[0]`."""
    if isinstance(data, dict):
        for key, value in cast("dict[object, object]", data).items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list):
        for index, value in enumerate(cast("list[object]", data)):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, data


# The kind of an incident without an event: an active run that finishes no steps.
STALLED: Final = "stalled"
_ENDS: Final = (run_events.FAILED, run_events.INTERRUPTED)
_KINDS: Final = (run_events.RESTARTED, run_events.RELAUNCHED, *_ENDS)
_STATE: Final = "run.json"
_EVIDENCE: Final = f"{run_events.EVIDENCE}: "
# Text about a job that reaches the time limit of its scheduler.
REACHED: Final = "reaches its time limit"
# Schedulers send a signal at most this many seconds before the limit; `sbatch --signal` can make it earlier.
_BEFORE_LIMIT: Final = 600.0
# Texts in the driver's warnings about waits.
_WAITS: Final = ("is stopped", "waiting for", " waits ", "deadlock", NO_STEP)


class Incident(NamedTuple):
    """A failure, an interruption or a standstill of a run.

    Attributes:
        kind: the kind of its event, or `stalled`.
        what: the first failure in one line.
        source: the file that records it.
        time: the time in seconds since 1970; None if only the state records the incident.
        step: the last finished step.
        process: the first process that failed, if there is evidence of it.
        others: descriptions of the workers that failed with it.
        lines: further lines of the event: location, cause, remedy.
        bundle: the evidence of the incident.
        nodes: descriptions of the nodes that were replaced after it.
        has_checkpoint: whether the run has a checkpoint to continue from.
    """

    kind: str
    what: str
    source: str
    time: float | None
    step: int
    process: FailedProcess | None = None
    others: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    bundle: Bundle | None = None
    nodes: tuple[str, ...] = ()
    has_checkpoint: bool = True

    @property
    def ended(self) -> bool:
        """Whether the incident ended the run."""
        return self.kind in _ENDS

    @property
    def alone(self) -> bool:
        """Whether only the dead processes were started again, and the others continued."""
        return self.kind == run_events.RELAUNCHED

    @property
    def restarted(self) -> bool:
        """Whether the whole run was started again."""
        return self.kind == run_events.RESTARTED

    @property
    def text(self) -> str:
        """All text about the incident, for matching the words of errors."""
        process = self.process
        parts = [self.what, *self.lines]
        return "\n".join(parts if process is None else [*parts, process.text, process.why])


def incidents(facts: RunFacts) -> list[Incident]:
    """Return the incidents of a run, oldest first."""
    # An end before a resumption is not the cause of the run's current state. The order of events is that of the file,
    # whatever the clock was set to.
    resumed = max((place for place, event in enumerate(facts.story) if event.kind == run_events.RESUMED), default=-1)
    since = facts.story[resumed].time if resumed >= 0 else 0.0
    bundles = {f"{EVIDENCE}/{bundle.path.name}": bundle for bundle in facts.bundles}
    ordered: list[Incident] = []
    for place, event in enumerate(facts.story):
        if event.kind in _KINDS:
            incident = _of_event(event, bundles)._replace(nodes=_nodes_after(event, facts))
            # What is left has no event: the driver was killed during the failure.
            bundles = {name: bundle for name, bundle in bundles.items() if bundle is not incident.bundle}
            ordered += [incident] if place > resumed or not incident.ended else []
    ordered += [_of_bundle(bundle) for bundle in bundles.values() if bundle.content.time >= since]
    ordered.sort(key=lambda incident: incident.time or 0.0)
    if facts.status in _ENDS and not (ordered and ordered[-1].ended):
        what, lines = facts.reason or f"the run is {facts.status}", tuple(facts.driver_end)
        ordered.append(Incident(facts.status, what, _STATE, facts.ended, facts.step, lines=lines))
    ordered = [incident._replace(has_checkpoint=facts.has_checkpoint) for incident in ordered]
    standstill = _standstill(facts)
    return ordered if standstill is None else [*ordered, standstill]


def seconds_without_step(facts: RunFacts) -> float | None:
    """Return the seconds since the last step of an active run; None while the step is not overdue."""
    usual = _usual_seconds(facts)
    if facts.status != RunStatus.RUNNING or usual is None:
        return None
    quiet = facts.looked - max(facts.moments[-1], *(event.time for event in facts.story), 0.0)
    return quiet if quiet >= max(FIRST_LOOK, SLOW * usual) else None


def _usual_seconds(facts: RunFacts) -> float | None:
    """Return the median duration of the last steps or, during an evaluation, of the last evaluations, or None."""
    if facts.evaluates:
        durations = facts.column(EVALUATION_TIME).last(STEPS).values
    else:
        durations = [after - before for before, after in pairwise(facts.moments[-STEPS:])]
    return median(durations) if durations else None


def _standstill(facts: RunFacts) -> Incident | None:
    """Return the standstill of an active run whose step takes much longer than usual, if some process holds it up:
    an asked process, or else one in the driver's warnings."""
    quiet, usual = seconds_without_step(facts), _usual_seconds(facts)
    waits = facts.held_up or [line for line in facts.warnings if any(word in line for word in _WAITS)][::-1]
    if quiet is None or usual is None or not waits:
        return None
    of_what = "evaluations" if facts.evaluates else "ones"
    what = f"{NO_STEP} for {quiet:.0f} s; the last {of_what} took {usual:.2g} s each"
    source = "asked of the run's processes" if facts.held_up else "logs/driver/rank_0.log"
    return Incident(STALLED, what, source, facts.looked - quiet, facts.step, lines=tuple(waits))


def _of_event(event: RunEvent, bundles: dict[str, Bundle]) -> Incident:
    named = (line.removeprefix(_EVIDENCE) for line in event.details if line.startswith(_EVIDENCE))
    bundle = next((bundles[name] for name in named if name in bundles), None)
    source = run_events.EVENTS if bundle is None else f"{EVIDENCE}/{bundle.path.name}/{FAILURE}"
    process, others = _processes(bundle)
    # The evidence is exact: an event comes after all processes have ended, and a restart's has its checkpoint's step.
    at, step = (event.time, event.step) if bundle is None else (bundle.content.time, bundle.content.step)
    return Incident(event.kind, event.text, source, at, step, process, others, event.details, bundle)


def _nodes_after(event: RunEvent, facts: RunFacts) -> tuple[str, ...]:
    """Return lines on the nodes that were missing at the restart after an incident, and on their replacements."""
    if event.kind != run_events.RESTARTED:
        return ()
    later = takewhile(lambda other: other.kind not in _KINDS, facts.story[facts.story.index(event) + 1 :])
    # An event about a returned node has no details.
    lost = [other for other in later if other.kind == run_events.NODES and other.details]
    return tuple("; ".join((other.text, *other.details)) for other in lost)


def _of_bundle(bundle: Bundle) -> Incident:
    content = bundle.content
    source = f"{EVIDENCE}/{bundle.path.name}/{FAILURE}"
    process, others = _processes(bundle)
    return Incident(run_events.FAILED, content.what, source, content.time, content.step, process, others, (), bundle)


def _processes(bundle: Bundle | None) -> tuple[FailedProcess | None, tuple[str, ...]]:
    if bundle is None or bundle.first is None:
        return None, ()
    _, *others = bundle.content.failures
    return bundle.first, tuple(f"`{other.name}`: {_short(other)}" for other in others)


def _short(process: FailedProcess) -> str:
    if process.died:
        return "died"
    first = process.text.strip().partition("\n")[0]
    name = process.type.rpartition(".")[2]
    return f"{name}: {first[:160]}" if first else name


def limit_reached(environ: Mapping[str, str], now: float) -> str | None:
    """Return a sentence if a Slurm job reaches its time limit at about `now` (seconds since 1970), else None."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    if not end.isascii() or not end.isdigit() or not -_BEFORE_LIMIT < now - float(end) < _BEFORE_LIMIT:
        return None
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(end)))
    return f"Slurm job {environ.get('SLURM_JOB_ID', '')} {REACHED} at {at}"
