"""The content of a report, gathered from a run's folder. Parts that the run does not have are empty."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ConfigDict, Field, ValidationError

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.live import labels
from rlinf_cli.memory import read_peaks
from rlinf_cli.runs.documents import (
    ORIGINS,
    PLACEMENT,
    OriginsFile,
    PlacedProcess,
    PlacementFile,
    read_provenance,
)
from rlinf_cli.runs.metric_columns import RunSeries, newest_of, series_of
from rlinf_cli.runs.run_lookup import find_run
from rlinf_cli.why.diagnosis import diagnose
from rlinf_cli.why.facts import MOST_METRICS_BYTES, read_facts, read_or_note
from rlinf_core.config.diagnostics import visible
from rlinf_core.errors import RunError
from rlinf_core.foreign.files import FileModel, Rank, first_fault, read_model, read_text
from rlinf_core.runners.metrics import metrics_in
from rlinf_core.runners.storage.first_contact import ContactCheck
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import RunState

FOLDER: Final = "samples"
_FILE = re.compile(r"step_(\d+)\.jsonl")


class _Turn(FileModel):
    """A turn of a conversation in a line of `samples/step_N.jsonl`."""

    model_config = ConfigDict(extra="allow")

    text: str
    who: str = ""
    segment: Rank = 0
    tool: str | None = None
    seconds: float | None = None
    failure: str | None = None


class _Sample(FileModel):
    """A line of `samples/step_N.jsonl`: an answer in the format of `AnswerGroup.lines`."""

    model_config = ConfigDict(extra="allow")

    reward: float
    slot: int = 0
    sample: int = 0
    prompt: str = ""
    text: str = ""
    answer: str = ""
    reason: str = ""
    finish_reason: str = ""
    parts: dict[str, float] = Field(default_factory=dict[str, float])
    pieces: list[str] = Field(default_factory=list[str])
    logprobs: list[float] = Field(default_factory=list[float])
    turns: list[_Turn] = Field(default_factory=list[_Turn])


def sampled_steps(run_folder: Path) -> list[int]:
    """Return the steps that have samples, ascending."""
    names = (_FILE.fullmatch(file.name) for file in (run_folder / FOLDER).glob("step_*.jsonl"))
    return sorted(int(match.group(1)) for match in names if match)


def read_samples(run_folder: Path, step: int | None = None) -> tuple[int, list[dict[str, Any]]]:
    """Return a step and its samples; by default the last step with samples.

    Raises:
        RunError: there are no samples, or the file cannot be read.
    """
    steps = sampled_steps(run_folder)
    if not steps:
        raise RunError(
            "the run has no samples",
            where=str(run_folder),
            help="recipes of language models write them every `runner.sample_interval` steps",
        )
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        listed = ", ".join(map(str, steps[:12])) + (", ..." if len(steps) > 12 else "")
        raise RunError(f"step {wanted} has no samples", where=str(run_folder), help=f"steps with samples: {listed}")
    file = run_folder / FOLDER / f"step_{wanted}.jsonl"
    try:
        lines = read_text(file).split("\n")
    except OSError as error:
        raise RunError("the samples cannot be read", where=str(file), why=error.strerror) from None
    return wanted, [_read(line, number, file) for number, line in enumerate(lines, start=1) if line]


def _read(line: str, number: int, file: Path) -> dict[str, Any]:
    try:
        sample = _Sample.model_validate_json(line)
    except ValidationError as error:
        raise RunError("the samples cannot be read", where=f"{file}:{number}", why=first_fault(error)) from None
    left_out = {"parts", "turns", *(() if sample.pieces else ("pieces", "logprobs"))} - sample.model_fields_set
    return sample.model_dump(exclude=left_out)


# Log-probability thresholds: plain above the first, yellow between, red below the second.
_LIKELY, _UNLIKELY = -0.7, -3.0


def samples_result(
    run: str | None,
    step: int | None,
    order: str,
    count: int,
    at_least: float | None,
    at_most: float | None,
    *,
    logprobs: bool,
) -> Result:
    """Return the samples of a step, with their rewards and the reasons for the rewards.

    Args:
        run: the run's folder or name; None for the active one, else the last.
        step: the training step; None for the last.
        order: `written`, `best`, `worst` or `random`.
        count: the maximum number of samples.
        at_least, at_most: the least and the greatest reward; None for any.
        logprobs: whether to color tokens by their log-probability.
    """
    folder = find_run(run)
    step, every = read_samples(folder.path, step)
    least = -math.inf if at_least is None else at_least
    most = math.inf if at_most is None else at_most
    chosen = [sample for sample in every if not (sample["reward"] < least or sample["reward"] > most)]
    if order == "random":
        random.shuffle(chosen)
    elif order != "written":
        chosen.sort(key=lambda sample: sample["reward"], reverse=order == "best")
    shown = chosen[:count]
    colour = logprobs and console.colored()
    others = [other for other in sampled_steps(folder.path) if other != step]
    hint = f"; --step {others[-1]} or another of {len(others)} for earlier ones" if others else ""
    legend = f"log-probabilities of tokens: yellow below {_LIKELY:g}, red below {_UNLIKELY:g}"
    notes = (*([legend] if colour else []), f"step {step}: {len(shown)} of {len(chosen)} samples{hint}")
    record = {"schema": "rlinf.samples/1", "run": str(folder.path), "step": step, "samples": shown}
    return Result(lambda: "\n\n".join(_block(sample, colour) for sample in shown), record, notes=notes)


def _block(sample: Mapping[str, Any], colour: bool) -> str:
    parts = "".join(f", {name} {value:g}" for name, value in sample.get("parts", {}).items())
    ended = {"length": ", cut off at the length limit", "aborted": ", aborted"}.get(sample["finish_reason"], "")
    head = (
        f"prompt {sample['slot']}, answer {sample['sample']}: reward {sample['reward']:g} ({sample['reason']}{ended})"
    )
    pieces = sample.get("pieces") or ()
    text = _coloured(pieces, sample["logprobs"]) if colour and pieces else _safe(sample["text"])
    lines = [console.style(head + parts, "bold")]
    turns = sample.get("turns") or ()
    if turns:
        branched = any(turn["segment"] for turn in turns)
        lines += [line for turn in turns for line in _turn(turn, branched=branched)]
    else:
        lines += _indented("asked", _safe(sample["prompt"]))
    # An agent may end without an answer, and its task, such as a game, may have no right answer.
    lines += _indented("answered", text) if text or not turns else []
    lines += _indented("right is", _safe(sample["answer"])) if sample["answer"] or not turns else []
    return "\n".join(lines)


def _turn(turn: Mapping[str, Any], *, branched: bool) -> list[str]:
    """Return the lines of a conversation turn with its time; for a tool also its name and error.

    Args:
        turn: the turn from a sample.
        branched: whether to number the conversations, because the agent's run had several.
    """
    text, details = _safe(turn["text"]).rstrip("\n"), list[str]()
    if branched and turn["who"] != "tool":
        details.append(f"conversation {turn['segment'] + 1}")
    if turn["tool"]:
        details.append(turn["tool"])
    if turn["seconds"]:
        details.append(f"{1000 * turn['seconds']:.1f} ms")
    if turn["failure"]:
        details.append(turn["failure"])
    return _indented(turn["who"], f"{text}  ({', '.join(details)})" if details else text)


def _indented(label: str, text: str) -> list[str]:
    # An answer may end with its stop sequence, a newline.
    first, *rest = text.rstrip("\n").split("\n")
    return [f"  {label:>8}  {first}", *(f"            {line}" for line in rest)]


def _coloured(pieces: Sequence[str], logprobs: Sequence[float]) -> str:
    details: list[str] = []
    for piece, logprob in zip(pieces, logprobs, strict=False):
        plain = _safe(piece)
        colour = None if logprob > _LIKELY else "yellow" if logprob > _UNLIKELY else "red"
        details.append(plain if colour is None else console.style(plain, colour))
    return "".join(details)


def _safe(text: str) -> str:
    """Return a text that is safe for terminals: control characters except newlines are escaped."""
    return "\n".join(visible(line) for line in text.split("\n"))


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
