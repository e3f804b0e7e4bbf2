"""The content of a report, gathered from a run's folder. Parts that the run does not have are empty."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlinf_cli.live import labels
from rlinf_cli.report.samples import read_samples, sampled_steps
from rlinf_cli.runs.documents import (
    ORIGINS,
    PLACEMENT,
    OriginsFile,
    PlacedProcess,
    PlacementFile,
    read_provenance,
)
from rlinf_cli.runs.memory_record import read_peaks
from rlinf_cli.runs.metric_columns import RunSeries, newest_of, series_of
from rlinf_cli.why.diagnosis import diagnose
from rlinf_cli.why.facts import MOST_METRICS_BYTES, read_facts, read_or_note
from rlinf_core.errors import RunError
from rlinf_core.foreign.files import read_model, read_text
from rlinf_core.runners.metrics import metrics_in
from rlinf_core.runners.storage.first_contact import ContactCheck
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import RunState

_MOST_SAMPLES: Final = 16
_MOST_FIRST: Final = 4
_MOST_VALUES: Final = 8
_MOST_FAULTS: Final = 3
_MOST_NOTES: Final = 10
_MIB: Final = 1 << 20


class Table(NamedTuple):
    """A table of text; `right` lists the columns that are aligned to the right."""

    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    right: Sequence[int] = ()


def gather(folder: RunFolder) -> dict[str, Any]:
    """Return the content of a run's report by the names that the template uses.

    A part that the run does not have is empty; a part that cannot be read is noted.

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
    placement = read_or_note(lambda: read_model(folder.path / PLACEMENT, PlacementFile), PlacementFile(), notes)
    origins = read_or_note(lambda: read_model(folder.path / ORIGINS, OriginsFile), OriginsFile(), notes)
    settings = _settings(origins)
    return {
        "folder": folder,
        "state": state,
        "status": facts.status,
        "reason": facts.reason,
        "series": series,
        "result": result_rows(state, series),
        "settings": settings,
        # The settings from the file and the command line.
        "asked": settings._replace(rows=[row for row in settings.rows if row[2] != "default"]),
        "config_text": read_or_note(lambda: read_text(folder.config_file), "", notes, missing=True),
        "processes": _processes(placement),
        "environment": _environment(placement),
        "picture": placement.picture,
        "story": facts.story,
        "samples": _samples(folder.path, notes),
        "provenance": read_or_note(lambda: read_provenance(folder.path), None, notes),
        "memory": _memory(folder, notes),
        "comparisons": _comparisons(facts.checks),
        "diagnosis": diagnose(facts),
        "traced": folder.trace_file.exists(),
        "notes": list(dict.fromkeys([*faults, *facts.notes[:_MOST_NOTES], *notes])),
        "made": time.time(),
    }


def result_rows(state: RunState, series: RunSeries) -> list[tuple[str, str]]:
    """Return the results as names and metrics."""
    newest = newest_of(series.columns)
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
    """Return the comparisons made before the first step, without columns that are empty in every row."""

    def row(check: ContactCheck) -> Sequence[str]:
        numbers = ("" if value is None else f"{value:.2g}" for value in (check.largest_difference, check.bound))
        seconds = "" if check.seconds is None else labels.duration(check.seconds)
        return check.component, check.what, check.with_, check.verdict, *numbers, seconds, check.note

    heads = ("by", "what", "with", "verdict", "difference", "bound", "time", "note")
    columns = {head: column for head, *column in zip(heads, *map(row, checks), strict=True) if any(column)}
    right = [place for place, head in enumerate(columns) if head in ("difference", "bound", "time")]
    return Table(list(columns), list(zip(*columns.values(), strict=True)), right)


def _samples(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the best and worst answers of the last step with samples, and a few of the first step."""
    steps = sampled_steps(folder)
    wanted = [(steps[-1], _MOST_SAMPLES)] if steps else []
    wanted += [(steps[0], _MOST_FIRST)] if len(steps) > 1 else []
    samples: list[dict[str, Any]] = []
    for step, most in wanted:
        try:
            every = [{**sample, "step": step} for sample in read_samples(folder, step)[1]]
        except RunError as error:
            notes.append(f"samples of step {step} cannot be read: {error}")
            continue
        ordered = sorted(every, key=lambda sample: -sample["reward"])
        if len(ordered) > most:
            best = _one_of_each_prompt(ordered)[: most // 2]
            taken = {id(sample) for sample in best}
            rest = [sample for sample in reversed(ordered) if id(sample) not in taken]
            ordered = [*best, *reversed(_one_of_each_prompt(rest)[: most - len(best)])]
        samples += ordered
    return samples


def _one_of_each_prompt(ordered: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return samples interleaved by prompt, since answers to the same prompt are similar."""
    counts: Counter[str] = Counter()
    rounds: list[int] = []
    for sample in ordered:
        rounds.append(counts[sample["prompt"]])
        counts[sample["prompt"]] += 1
    return [sample for _, sample in sorted(zip(rounds, ordered, strict=True), key=lambda pair: pair[0])]


def _memory(folder: RunFolder, notes: list[str]) -> Table:
    """Return the peak memory of each process by phase."""
    rows = [
        (f"{component}:{rank}", phase, _mib(peak.rss), _mib(peak.device) if peak.device else "-")
        for (component, rank), phases in read_or_note(lambda: read_peaks(folder.memory_file), {}, notes).items()
        for phase, peak in phases.items()
    ]
    return Table(("process", "phase", "host", "accelerator"), rows)


def _mib(size: float) -> str:
    return f"{size / _MIB:.0f} MiB"
