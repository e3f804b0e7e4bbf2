"""The rows of `rlinf runs`."""

from __future__ import annotations

import math
import os
import shlex
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.console import shown
from rlinf_cli.live import labels
from rlinf_cli.runs.run_lookup import all_runs, damaged_checkpoints, runs_folder, unreadable, warn_of_unreadable
from rlinf_core.foreign.files import open_regular
from rlinf_core.runners.metrics import Metrics, decode
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import outside, why_not_own
from rlinf_core.runners.storage.run_status import RunStatus

SCHEMA: Final = "rlinf.runs/1"
# Runs without a result come last.
_SORTED: Final[dict[str, Callable[[RunRow], Any]]] = {
    "age": lambda row: (row.run.state.created, row.run.path.name),
    "name": lambda row: row.run.path.name,
    "step": lambda row: row.run.state.step,
    "size": lambda row: row.size,
    "result": lambda row: (row.value is not None, row.value or 0.0),
}
# Bytes at the end of a metrics file that are read.
_LAST_BYTES = 64 << 20


@dataclass(frozen=True)
class RunRow:
    """One row of the table: a run, its result and its size.

    Attributes:
        result: the first headline metric of the last evaluation, else of the last step, as in `success 0.92`; empty
        without such a metric.
        value: the value of that metric; None if it is not finite.
        size: the bytes in the run folder, and in the run's own checkpoints outside.
        elsewhere: the folder of the run's checkpoints, if outside of the run folder.
        elsewhere_size: the bytes in `elsewhere`; 0 if the folder is not the run's own.
        foreign: why the run must not delete `elsewhere`; None if it may.
        damaged: descriptions of damaged checkpoints.
    """

    run: RunFolder
    status: RunStatus
    reason: str
    result: str
    value: float | None
    evaluation: Metrics | None
    size: int
    elsewhere: Path | None
    elsewhere_size: int
    foreign: str | None
    damaged: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return the JSON record of the run."""
        evaluation, state = self.evaluation, self.run.state
        metrics = sorted(evaluation.metrics.items()) if evaluation else ()
        evaluated = {name: value for name, value in metrics if name.startswith("eval/")}
        return {
            "name": self.run.path.name,
            "folder": str(self.run.path),
            "recipe": state.recipe,
            "kind": state.kind,
            "experiment": state.experiment,
            "status": str(self.status),
            "reason": self.reason,
            "step": state.step,
            "result": {"name": self.result.split()[0], "value": self.value} if self.result else None,
            "evaluation": {"step": evaluation.step, "metrics": evaluated} if evaluation else None,
            "created": state.created,
            "ended": state.ended,
            "bytes": self.size,
            "damaged_checkpoints": list(self.damaged),
            "checkpoints_elsewhere": None
            if self.elsewhere is None
            else {
                "folder": str(self.elsewhere),
                "bytes": self.elsewhere_size,
                "deleted_with_run": self.foreign is None,
                "reason": self.foreign or "",
            },
        }


def listed_runs(statuses: Sequence[RunStatus] | None, recipe: str | None, sort: str, *, reverse: bool) -> Result:
    """Return the result of `rlinf runs`."""
    rows = sorted(rows_of(selected(statuses=statuses, recipe=recipe)), key=_SORTED[sort], reverse=sort != "name")
    if reverse:
        rows.reverse()
    folder = runs_folder()
    if console.verbosity.json:
        return Result(
            record={
                "schema": SCHEMA,
                "folder": str(folder.absolute()),
                "runs": [row.record() for row in rows],
                "unreadable": [{"folder": str(broken.path), "reason": broken.why} for broken in unreadable()],
            }
        )
    warn_of_unreadable()
    if not rows:
        return Result(notes=(f"no such runs in {folder}" if statuses or recipe else f"no runs in {folder}",))
    damaged = [f"{shown(row.run.path)}: {words}" for row in rows for words in row.damaged]
    failed = next((row for row in rows if row.status == RunStatus.FAILED), None)
    hints = [] if failed is None else [f"`rlinf why {shlex.quote(shown(failed.run.path))}` says why a run failed"]
    return Result(runs_text(rows), notes=(*map(console.warning, damaged), *hints))


def selected(
    *,
    statuses: Sequence[RunStatus] | None = None,
    recipe: str | None = None,
    among: Sequence[RunFolder] | None = None,
) -> list[RunFolder]:
    """Return the runs, or the runs in `among`, filtered by status and recipe."""
    return [
        run
        for run in (all_runs() if among is None else among)
        if (not statuses or run.state.outcome[0] in statuses) and recipe in (None, run.state.recipe)
    ]


def rows_of(runs: Iterable[RunFolder]) -> list[RunRow]:
    """Return the row of each run."""
    return [_row(run) for run in runs]


def _row(run: RunFolder) -> RunRow:
    state = run.state
    status, reason = state.outcome
    last, evaluated = newest_metrics(run.metrics_file)
    headline = labels.first_headline(evaluated.metrics, "eval") if evaluated else None
    if headline is None and last is not None:
        headline = labels.first_headline(last.metrics, "env", "rollout")
    elsewhere = outside(run.path, state)
    elsewhere = elsewhere if elsewhere is not None and os.path.lexists(elsewhere) else None
    foreign = why_not_own(run.path, state) if elsewhere is not None else None
    # Do not measure a foreign folder, which may be the whole disk.
    elsewhere_size = _size(elsewhere) if elsewhere is not None and foreign is None else 0
    return RunRow(
        run=run,
        status=RunStatus(status),
        reason=reason,
        result="" if headline is None else f"{headline.word} {headline.text}",
        value=None if headline is None or not math.isfinite(headline.value) else headline.value,
        evaluation=evaluated,
        size=_size(run.path) + elsewhere_size,
        damaged=tuple(damaged_checkpoints(run)),
        elsewhere=elsewhere,
        elsewhere_size=elsewhere_size,
        foreign=foreign,
    )


def runs_text(rows: Sequence[RunRow]) -> str:
    """Return the table of runs."""
    cells: list[tuple[str, ...]] = []
    for row in rows:
        state = row.run.state
        recipe = state.recipe if state.kind == "training" else f"{state.recipe}, {state.kind}"
        age = age_text(time.time() - state.created)
        cells.append((row.run.path.name, recipe, row.status, str(state.step), row.result, age, size_text(row.size)))
    heads = ("run", "recipe", "status", "step", "result", "age", "size")
    return console.table(heads, cells, right=(3, 5, 6), keep=(0, 2))


def age_text(seconds: float) -> str:
    """Return an age as in `40 s`, `12 min`, `5 h` or `3 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def size_text(size: float) -> str:
    """Return a size as in `12 kB` or `3.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{labels.figure(round(size, 1) if unit != 'B' else size)} {unit}"
        size /= 1000
    return f"{labels.figure(size)} TB"


def _size(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                info = os.lstat(os.path.join(root, name))
            except OSError:
                continue  # deleted meanwhile
            total += info.st_size if stat.S_ISREG(info.st_mode) else 0
    return total


def newest_metrics(path: Path) -> tuple[Metrics | None, Metrics | None]:
    """Return the metrics of the last step in `path`, and of the last evaluated step; None for a missing step.

    An unreadable file counts as empty, so that the table still shows the other runs.

    Lines are parsed backwards, no more than needed.
    """
    last: Metrics | None = None
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            content = file.read(_LAST_BYTES)
    except OSError:
        return None, None
    for raw in reversed(content.splitlines(keepends=True)):
        evaluated = b'"eval/' in raw
        if last is not None and not evaluated:
            continue
        line = decode(raw)
        last = last or line
        if line is not None and evaluated:
            return last, line
    return last, None
