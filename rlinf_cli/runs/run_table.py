"""The rows of `rlinf runs`: what is known of a run without its workers, and the deletion of one."""

from __future__ import annotations

import math
import os
import shutil
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_cli.console import console
from rlinf_cli.live import labels
from rlinf_cli.runs.run_lookup import all_runs, outcome
from rlinf_core.runners.metrics import Metrics, decode
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_state import STATE
from rlinf_core.runners.storage.run_status import RunStatus


@dataclass(frozen=True)
class RunRow:
    """One row of the table: a run, its result and its size.

    Attributes:
        result: the first headline figure of the last evaluation, else of the last step, as in `success 0.92`; empty
            where there is none.
        value: that figure.
        size: bytes of its folder, and of its checkpoints where they are elsewhere.
        created: seconds since 1970.
        ended: likewise, or None.
    """

    name: str
    folder: Path
    recipe: str
    experiment: str
    status: RunStatus
    reason: str
    step: int
    result: str
    value: float | None
    evaluation: Metrics | None
    created: float
    ended: float | None
    size: int

    def record(self) -> dict[str, Any]:
        """Return the run as it is told in JSON."""
        found = self.evaluation
        metrics = (
            {name: number if math.isfinite(number) else None for name, number in found.metrics.items()} if found else {}
        )
        evaluated = {name: number for name, number in sorted(metrics.items()) if name.startswith("eval/")}
        return {
            "name": self.name,
            "folder": str(self.folder),
            "recipe": self.recipe,
            "experiment": self.experiment,
            "status": str(self.status),
            "reason": self.reason,
            "step": self.step,
            "result": {"name": self.result.split()[0], "value": self.value} if self.result else None,
            "evaluation": {"step": found.step, "metrics": evaluated} if found else None,
            "created": self.created,
            "ended": self.ended,
            "bytes": self.size,
        }


def selected(
    log_path: Path,
    *,
    statuses: Sequence[RunStatus] | None = None,
    recipe: str | None = None,
    among: Sequence[RunFolder] | None = None,
) -> list[RunFolder]:
    """Return the runs of a folder, or those of `among`, that have one of the statuses and are of the recipe."""
    return [
        run
        for run in (all_runs(log_path) if among is None else among)
        if (not statuses or outcome(run.state)[0] in statuses) and recipe in (None, run.state.recipe)
    ]


def rows_of(runs: Iterable[RunFolder]) -> list[RunRow]:
    """Return the row of each run."""
    return [_row(run) for run in runs]


def _row(run: RunFolder) -> RunRow:
    state = run.state
    status, reason = outcome(state)
    last, evaluated = newest_metrics(run.metrics_file)
    headlines = labels.headlines(evaluated.metrics, "eval") if evaluated else []
    if not headlines and last is not None:
        headlines = labels.headlines(last.metrics, "env", "rollout")
    word, figure = headlines[0] if headlines else ("", "")
    return RunRow(
        name=run.path.name,
        folder=run.path,
        recipe=state.recipe,
        experiment=state.experiment,
        status=RunStatus(status),
        reason=reason,
        step=state.step,
        result=f"{word} {figure}".strip(),
        value=float(figure) if figure else None,
        evaluation=evaluated,
        created=state.created,
        ended=state.ended,
        size=sum(_size(path) for path in _places(run)),
    )


def runs_text(rows: Sequence[RunRow]) -> str:
    """Return the table of runs."""
    now = time.time()
    cells = [
        (row.name, row.recipe, row.status, str(row.step), row.result, age_text(now - row.created), size_text(row.size))
        for row in rows
    ]
    return console.table(
        ("run", "recipe", "status", "step", "result", "age", "size"), cells, right=(3, 5, 6), keep=(0, 2)
    )


def age_text(seconds: float) -> str:
    """Return `40 s`, `12 min`, `5 h`, `3 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def size_text(size: float) -> str:
    """Return `12 kB`, `3.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{labels.figure(round(size, 1) if unit != 'B' else size)} {unit}"
        size /= 1000
    return f"{labels.figure(size)} TB"


def delete_run(run: RunFolder) -> None:
    """Delete a run that has ended: its checkpoints, then its folder, whose state goes last.

    What is cut short in between is still a run, which can be deleted again. Links are deleted, not followed.

    Raises:
        OSError: something cannot be deleted, or the run goes on again.
    """
    if run.refresh().alive:
        raise OSError(None, "the run has begun again", str(run.path))
    for place in _places(run):
        if place != run.path:
            shutil.rmtree(place)
    for child in sorted(run.path.iterdir()):
        if child.name == STATE:
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()
    (run.path / STATE).unlink()
    run.path.rmdir()


def _places(run: RunFolder) -> list[Path]:
    """Return the folders that are the run's own: its folder, and that of its checkpoints where it is elsewhere."""
    checkpoints = run.path / run.state.checkpoints
    own = checkpoints.name == run.path.name and not checkpoints.is_relative_to(run.path) and checkpoints.is_dir()
    return [run.path, checkpoints] if own else [run.path]


def _size(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                found = os.lstat(os.path.join(root, name))
            except OSError:
                continue  # deleted meanwhile
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


def newest_metrics(path: Path) -> tuple[Metrics | None, Metrics | None]:
    """Return the last step's metrics in `path`, and those of the last step that was evaluated; None where none is.

    Reads no more lines than it needs, from the end.
    """
    last: Metrics | None = None
    try:
        content = path.read_bytes()
    except FileNotFoundError:
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
