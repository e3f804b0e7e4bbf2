"""Content of a report, gathered from the folder of a run."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlinf_cli.live import labels
from rlinf_cli.report.documents import ORIGINS, PLACEMENT, DrawnPlacement, OriginsFile, PlacedProcess, PlacementFile
from rlinf_cli.report.series import RunSeries, series_of, telling_steps
from rlinf_cli.report.trace_steps import TraceBar, bars_of_steps
from rlinf_cli.runs.answer_samples import read_samples, sampled_steps
from rlinf_cli.runs.memory_record import read_peaks
from rlinf_cli.runs.provenance import Provenance, read_provenance
from rlinf_cli.why.diagnosis import Diagnosis, diagnose
from rlinf_cli.why.facts import MOST_METRICS_BYTES, read_facts
from rlinf_core.errors import RunError
from rlinf_core.foreign.file_models import M, read_model
from rlinf_core.foreign.files import read_text
from rlinf_core.runners.metrics import Metrics, metrics_in
from rlinf_core.runners.storage.first_contact import ContactCheck, read_comparisons
from rlinf_core.runners.storage.run_events import RunEvent, story_with_faults
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import RunState

_MOST_SAMPLES = 16
_MOST_FIRST = 4
_MOST_TEXT = 3000
_MOST_VIDEOS = 12
_MOST_BARS = 1500
_MIB = 1 << 20
_MOST_FAULTS = 3


class Setting(NamedTuple):
    """A value of the configuration and its origin: file and line, `override` or `default`."""

    path: str
    value: str
    origin: str
    where: str


class ProcessRow(NamedTuple):
    """A process of the placement."""

    name: str
    node: str
    unit: str
    python: str


class EnvRow(NamedTuple):
    """A variable of a component's processes: one value, or a range where it differs by rank."""

    component: str
    name: str
    value: str
    layer: str


class StepTimeline(NamedTuple):
    """Activity of the processes in one step of a traced run.

    Attributes:
        roles: why the step is shown, as in `slowest`.
        seconds: the duration, in seconds.
        left_out: the number of shorter bars not shown.
    """

    step: int
    roles: tuple[str, ...]
    seconds: float
    bars: Sequence[TraceBar]
    left_out: int


class PeakRow(NamedTuple):
    """The peak memory of a process in a phase, in MiB."""

    process: str
    phase: str
    host: float
    accelerator: float


class Sample(NamedTuple):
    """An answer of a language model."""

    step: int
    prompt: str
    text: str
    answer: str
    reward: float
    reason: str


@dataclass(frozen=True)
class RunContent:
    """Content of a report. Parts that the run does not have are empty.

    Attributes:
        status, reason: how the run ended, from its state or because its process has vanished.
        settings: the whole configuration.
        picture: the placement as it is drawn.
        videos: files below the run folder, the newest last.
        memory: the most that processes held, by phase.
        comparisons: what was compared before the first step.
        diagnosis: the causes of failures, or of not learning, as `rlinf why` names them.
        notes: what could not be read.
    """

    folder: RunFolder
    state: RunState
    status: str
    reason: str
    series: RunSeries
    result: Sequence[tuple[str, str]]
    settings: Sequence[Setting]
    config_text: str
    processes: Sequence[ProcessRow]
    environment: Sequence[EnvRow]
    picture: DrawnPlacement | None
    story: Sequence[RunEvent]
    timelines: Sequence[StepTimeline]
    samples: Sequence[Sample]
    videos: Sequence[Path]
    provenance: Provenance | None
    memory: Sequence[PeakRow]
    comparisons: Sequence[ContactCheck]
    diagnosis: Diagnosis
    notes: Sequence[str]
    made: float


def gather(folder: RunFolder) -> RunContent:
    """Return the content of a run's report. A part that cannot be read becomes a note.

    Raises:
        OSError: the metrics cannot be read.
    """
    notes: list[str] = []
    state = folder.state
    status, reason = state.outcome
    lines: Sequence[Metrics] | None = None
    if _size(folder.metrics_file) <= MOST_METRICS_BYTES:
        lines, line_faults = metrics_in(folder.metrics_file).with_faults(most=3)
        notes += line_faults
    series = series_of(metrics_in(folder.metrics_file) if lines is None else lines)
    placement = _document(folder.path / PLACEMENT, PlacementFile, notes)
    origins = _document(folder.path / ORIGINS, OriginsFile, notes)
    story, story_faults = story_with_faults(folder.path)
    notes += story_faults[:_MOST_FAULTS]
    return RunContent(
        folder=folder,
        state=state,
        status=status,
        reason=reason,
        series=series,
        result=_result(state, series),
        settings=_settings(origins),
        config_text=_text(folder.config_file, notes),
        processes=_processes(placement),
        environment=_environment(placement),
        picture=placement.picture,
        story=story,
        timelines=_timelines(folder, series, notes),
        samples=_samples(folder.path, notes),
        videos=_videos(folder.path),
        provenance=_provenance(folder.path, notes),
        memory=_memory(folder, notes),
        comparisons=read_comparisons(folder.path),
        diagnosis=diagnose(read_facts(folder, lines)),
        notes=notes,
        made=time.time(),
    )


def _result(state: RunState, series: RunSeries) -> list[tuple[str, str]]:
    """Return the results as names and figures."""
    newest = {name: column.last for name, column in series.columns.items()}
    rows: list[tuple[str, str]] = []
    if series.evaluations:
        step, metrics = series.evaluations[-1]
        headline = labels.figures_text(labels.headlines(metrics, "eval"))
        rows.append(("last evaluation", f"{headline} (step {step})"))
    training = labels.headlines(newest, "env", "rollout")
    if training:
        rows.append(("last training step", labels.figures_text(training)))
    rows.append(("steps", str(state.step)))
    if state.ended is not None:
        rows.append(("from beginning to end", labels.clock(state.ended - state.created)))
    if series.pace is not None:
        rows.append(("speed", labels.speed(series.pace)))
    if state.resumed_from is not None:
        rows.append(("continued from", Path(state.resumed_from).name))
    return rows


def _settings(origins: OriginsFile) -> list[Setting]:
    rows: list[Setting] = []
    for value in origins.values:
        where = f"{value.file}:{value.line}" if value.origin == "file" and value.line else value.origin
        text = value.value if isinstance(value.value, str) else json.dumps(value.value, ensure_ascii=False)
        rows.append(Setting(value.path, text, value.origin, where))
    return rows


def _processes(placement: PlacementFile) -> list[ProcessRow]:
    rows: list[ProcessRow] = []
    for name, process in _every_process(placement):
        held = ", ".join(str(rank) for rank in process.local_hardware_ranks)
        unit = f"{process.hardware_type or 'accelerator'} {held}" if held else "-"
        node = f"{process.node_rank} ({process.node_group})"
        rows.append(ProcessRow(f"{name}:{process.rank}", node, unit, process.python or "the node's own"))
    return rows


def _environment(placement: PlacementFile) -> list[EnvRow]:
    """Return the variables of each component's processes; a value that differs by rank becomes a range."""
    values: dict[tuple[str, str], list[str]] = {}
    layers: dict[tuple[str, str], str] = {}
    counts: dict[str, int] = {}
    for component, process in _every_process(placement):
        counts[component] = counts.get(component, 0) + 1
        for name, value in process.env.items():
            values.setdefault((component, name), []).append(value)
            layers[component, name] = process.env_layers.get(name, "")
    rows: list[EnvRow] = []
    for (component, name), rank_values in values.items():
        distinct = list(dict.fromkeys(rank_values))
        text = distinct[0] if len(distinct) == 1 else " | ".join(distinct[:8])
        if len(distinct) > 8:
            text = f"{distinct[0]} ... {distinct[-1]} ({len(distinct)} values, by rank)"
        if len(rank_values) < counts[component]:
            text += f" (in {len(rank_values)} of {counts[component]} processes)"
        rows.append(EnvRow(component, name, text, layers[component, name]))
    return rows


def _every_process(placement: PlacementFile) -> list[tuple[str, PlacedProcess]]:
    return [(name, process) for name, placed in placement.components.items() for process in placed.processes]


def _timelines(folder: RunFolder, series: RunSeries, notes: list[str]) -> list[StepTimeline]:
    roles: dict[int, list[str]] = {}
    for role, step in telling_steps(series.moments).items():
        roles.setdefault(step, []).append(role)
    if not roles or not folder.trace_file.exists():
        return []
    shown = sorted(moment for moment in series.moments if moment[0] in roles)
    windows = {step: (ended - seconds, ended) for step, ended, seconds in shown}
    try:
        bars = bars_of_steps(folder.trace_file, windows, _MOST_BARS)
    except OSError as error:
        notes.append(f"the trace cannot be read: {error.strerror}")
        return []
    return [StepTimeline(step, tuple(roles[step]), seconds, *bars[step]) for step, _, seconds in shown if bars[step][0]]


def _samples(folder: Path, notes: list[str]) -> list[Sample]:
    """Return the best and worst answers of the last step with samples, and a few of the first step."""
    steps = sampled_steps(folder)
    wanted = [(steps[-1], _MOST_SAMPLES)] if steps else []
    wanted += [(steps[0], _MOST_FIRST)] if len(steps) > 1 else []
    samples: list[Sample] = []
    for step, most in wanted:
        try:
            every = [_sample(step, sample) for sample in read_samples(folder, step)[1]]
        except (RunError, ValueError, TypeError, KeyError) as error:
            notes.append(f"samples of step {step} cannot be read: {error}")
            continue
        ordered = sorted(every, key=lambda sample: -sample.reward)
        if len(ordered) > most:
            best = _one_of_each_prompt(ordered)[: most // 2]
            taken = {id(sample) for sample in best}
            rest = [sample for sample in reversed(ordered) if id(sample) not in taken]
            ordered = [*best, *reversed(_one_of_each_prompt(rest)[: most - len(best)])]
        samples += ordered
    return samples


def _one_of_each_prompt(ordered: Sequence[Sample]) -> list[Sample]:
    """Return samples interleaved by prompt, since answers to one prompt are alike."""
    counts: Counter[str] = Counter()
    rounds: list[int] = []
    for sample in ordered:
        rounds.append(counts[sample.prompt])
        counts[sample.prompt] += 1
    return [sample for _, sample in sorted(zip(rounds, ordered, strict=True), key=lambda pair: pair[0])]


def _sample(step: int, data: Mapping[str, Any]) -> Sample:
    def text(name: str) -> str:
        text = str(data.get(name, ""))
        return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ... ({len(text)} characters)"

    return Sample(step, text("prompt"), text("text"), text("answer"), float(data["reward"]), text("reason"))


def _videos(folder: Path) -> list[Path]:
    """Return the newest videos of the run, the newest last."""
    videos = [path for path in folder.rglob("*.mp4") if path.is_file() and not path.is_symlink()]
    return sorted(videos, key=lambda path: (path.stat().st_mtime, path.name))[-_MOST_VIDEOS:]


def _provenance(folder: Path, notes: list[str]) -> Provenance | None:
    try:
        return read_provenance(folder)
    except RunError as error:
        notes.append(f"{error.message}: {error.why}")
        return None


def _memory(folder: RunFolder, notes: list[str]) -> list[PeakRow]:
    """Return the peak memory of each process by phase."""
    try:
        peaks = read_peaks(folder.memory_file)
    except RunError as error:
        notes.append(str(error))
        return []
    return [
        PeakRow(f"{component}:{rank}", phase, peak.rss / _MIB, peak.device / _MIB)
        for (component, rank), phases in peaks.items()
        for phase, peak in phases.items()
    ]


def _document(path: Path, model: type[M], notes: list[str]) -> M:
    try:
        return read_model(path, model)
    except FileNotFoundError:
        return model()
    except OSError as error:
        notes.append(f"{path.name} cannot be read: it {error.strerror}")
        return model()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _text(path: Path, notes: list[str]) -> str:
    try:
        return read_text(path)
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
        return ""
