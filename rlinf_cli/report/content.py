"""The content of a report, gathered from the folder of a run. Parts that the run does not have are empty."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlinf_cli.live import labels
from rlinf_cli.report.samples import read_samples, sampled_steps
from rlinf_cli.runs.documents import (
    ORIGINS,
    PLACEMENT,
    DrawnPlacement,
    OriginsFile,
    PlacedProcess,
    PlacementFile,
    Provenance,
    read_provenance,
)
from rlinf_cli.runs.memory_record import read_peaks
from rlinf_cli.runs.metric_columns import MetricColumn, RunSeries, newest_of, series_of
from rlinf_cli.why.diagnosis import Diagnosis, diagnose
from rlinf_cli.why.facts import MOST_METRICS_BYTES, read_facts
from rlinf_core.errors import RunError
from rlinf_core.foreign.files import M, read_model, read_text
from rlinf_core.runners.metrics import metrics_in
from rlinf_core.runners.storage.first_contact import ContactCheck
from rlinf_core.runners.storage.run_events import RunEvent
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import RunState

_MOST_SAMPLES: Final = 16
_MOST_FIRST: Final = 4
_MOST_TEXT: Final = 3000
_MOST_VIDEOS: Final = 12
_MOST_VALUES: Final = 8
_MOST_FAULTS: Final = 3
_MOST_NOTES: Final = 10
_MIB: Final = 1 << 20


class Table(NamedTuple):
    """A table of text; `right` are the columns that are aligned to the right."""

    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    right: Sequence[int] = ()


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
    """The content of a report.

    Attributes:
        status, reason: how the run ended, from its state or because its process has vanished.
        columns: the finite values of all metrics.
        settings, asked: the whole configuration with its origins, and what the file and the command line gave.
        environment: the variables of each component's processes: one value, or a range where it differs by rank.
        picture: the placement as it is drawn.
        videos: files below the run folder, the newest last.
        memory: the most that processes held, by phase.
        comparisons: what was compared before the first step.
        diagnosis: the causes of failures, or of not learning, as `rlinf why` names them.
        traced: whether the run has a trace.
        notes: what could not be read.
    """

    folder: RunFolder
    state: RunState
    status: str
    reason: str
    series: RunSeries
    columns: Mapping[str, MetricColumn]
    result: Sequence[tuple[str, str]]
    settings: Table
    asked: Table
    config_text: str
    processes: Table
    environment: Table
    picture: DrawnPlacement | None
    story: Sequence[RunEvent]
    samples: Sequence[Sample]
    videos: Sequence[Path]
    provenance: Provenance | None
    memory: Table
    comparisons: Table
    diagnosis: Diagnosis
    traced: bool
    notes: Sequence[str]
    made: float


def gather(folder: RunFolder) -> RunContent:
    """Return the content of a run's report. A part that cannot be read becomes a note.

    Raises:
        OSError: the metrics cannot be read.
    """
    notes: list[str] = []
    state = folder.state
    lines, faults = metrics_in(folder.metrics_file), list[str]()
    if folder.metrics_file.exists() and folder.metrics_file.stat().st_size <= MOST_METRICS_BYTES:
        lines, faults = lines.with_faults(most=_MOST_FAULTS)
    series = series_of(lines)
    facts = read_facts(folder, series)
    columns = series.finite()
    placement = _document(folder.path / PLACEMENT, PlacementFile, notes)
    settings = _settings(_document(folder.path / ORIGINS, OriginsFile, notes))
    return RunContent(
        folder=folder,
        state=state,
        status=facts.status,
        reason=facts.reason,
        series=series,
        columns=columns,
        result=result_rows(state, series, columns),
        settings=settings,
        asked=settings._replace(rows=[row for row in settings.rows if row[2] != "default"]),
        config_text=_text(folder.config_file, notes),
        processes=_processes(placement),
        environment=_environment(placement),
        picture=placement.picture,
        story=facts.story,
        samples=_samples(folder.path, notes),
        videos=_videos(folder.path),
        provenance=_provenance(folder.path, notes),
        memory=_memory(folder, notes),
        comparisons=_comparisons(facts.checks),
        diagnosis=diagnose(facts),
        traced=folder.trace_file.exists(),
        notes=list(dict.fromkeys([*faults, *facts.notes[:_MOST_NOTES], *notes])),
        made=time.time(),
    )


def result_rows(state: RunState, series: RunSeries, columns: Mapping[str, MetricColumn]) -> list[tuple[str, str]]:
    """Return the results as names and metrics."""
    newest = newest_of(columns)
    rows: list[tuple[str, str]] = []
    if series.evaluations:
        step, metrics = series.evaluations[-1]
        rows.append(("last evaluation", f"{labels.figures_text(labels.headlines(metrics, 'eval'))} (step {step})"))
    if training := labels.headlines(newest, "env", "rollout"):
        rows.append(("last training step", labels.figures_text(training)))
    rows.append(("steps", str(state.step)))
    if state.ended is not None:
        rows.append(("from beginning to end", labels.clock(state.ended - state.created)))
    if series.pace is not None:
        rows.append(("speed", labels.speed(series.pace)))
    if state.resumed_from is not None:
        rows.append(("continued from", Path(state.resumed_from).name))
    return rows


def _settings(origins: OriginsFile) -> Table:
    rows: list[tuple[str, str, str]] = []
    for value in origins.values:
        where = f"{value.file}:{value.line}" if value.origin == "file" and value.line else value.origin
        text = value.value if isinstance(value.value, str) else json.dumps(value.value, ensure_ascii=False)
        rows.append((value.path, text, where))
    return Table(("key", "value", "from"), rows)


def _processes(placement: PlacementFile) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, process in _every_process(placement):
        held = ", ".join(str(rank) for rank in process.local_hardware_ranks)
        unit = f"{process.hardware_type or 'accelerator'} {held}" if held else "-"
        node = f"{process.node_rank} ({process.node_group})"
        rows.append((f"{name}:{process.rank}", node, unit, process.python or "the node's own"))
    return Table(("process", "node", "holds", "python"), rows)


def _environment(placement: PlacementFile) -> Table:
    values: dict[tuple[str, str], list[str]] = {}
    layers: dict[tuple[str, str], str] = {}
    counts = Counter(component for component, _ in _every_process(placement))
    for component, process in _every_process(placement):
        for name, value in process.env.items():
            values.setdefault((component, name), []).append(value)
            layers[component, name] = process.env_layers.get(name, "")
    rows: list[tuple[str, ...]] = []
    for (component, name), rank_values in values.items():
        distinct = list(dict.fromkeys(rank_values))
        text = " | ".join(distinct)
        if len(distinct) > _MOST_VALUES:
            text = f"{distinct[0]} ... {distinct[-1]} ({len(distinct)} values, by rank)"
        if len(rank_values) < counts[component]:
            text += f" (in {len(rank_values)} of {counts[component]} processes)"
        rows.append((component, name, text, layers[component, name]))
    return Table(("component", "variable", "value", "set by"), rows)


def _every_process(placement: PlacementFile) -> list[tuple[str, PlacedProcess]]:
    return [(name, process) for name, placed in placement.components.items() for process in placed.processes]


def _comparisons(checks: Sequence[ContactCheck]) -> Table:
    """Return what was compared before the first step, without columns that are empty in every row."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.2g}"

    columns = {
        "by": [check.component for check in checks],
        "what": [check.what for check in checks],
        "with": [check.with_ for check in checks],
        "verdict": [check.verdict for check in checks],
        "difference": [number(check.largest_difference) for check in checks],
        "bound": [number(check.bound) for check in checks],
        "time": ["" if check.seconds is None else labels.duration(check.seconds) for check in checks],
        "note": [check.note for check in checks],
    }
    heads = [head for head, column in columns.items() if any(column)]
    right = [place for place, head in enumerate(heads) if head in ("difference", "bound", "time")]
    return Table(heads, list(zip(*(columns[head] for head in heads), strict=True)), right)


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


def _memory(folder: RunFolder, notes: list[str]) -> Table:
    """Return the peak memory of each process by phase."""
    try:
        peaks = read_peaks(folder.memory_file)
    except RunError as error:
        notes.append(str(error))
        return Table()
    rows = [
        (f"{component}:{rank}", phase, _mib(peak.rss), _mib(peak.device) if peak.device else "-")
        for (component, rank), phases in peaks.items()
        for phase, peak in phases.items()
    ]
    return Table(("process", "phase", "host", "accelerator"), rows)


def _mib(size: float) -> str:
    return f"{size / _MIB:.0f} MiB"


def _document(path: Path, model: type[M], notes: list[str]) -> M:
    try:
        return read_model(path, model)
    except FileNotFoundError:
        return model()
    except OSError as error:
        notes.append(f"{path.name} cannot be read: it {error.strerror}")
        return model()


def _text(path: Path, notes: list[str]) -> str:
    try:
        return read_text(path)
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
        return ""
