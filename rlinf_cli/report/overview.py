"""The page of several runs side by side: a row and a curve of each."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from rlinf_cli.live import labels
from rlinf_cli.report import charts
from rlinf_cli.report.page import Drawings, write_page
from rlinf_cli.report.report_writing import NAME
from rlinf_cli.report.series import Band, RunSeries, series_of
from rlinf_core.runners.metrics import metrics_in
from rlinf_core.runners.storage.run_folder import RunFolder

_MOST_CURVES: Final = 3


class _ShownRun(NamedTuple):
    """A run and its metrics."""

    folder: RunFolder
    series: RunSeries


def overview_page(folders: Sequence[RunFolder], path: Path, *, refresh: int = 0) -> str:
    """Return the page of several runs as one file; runs with a report of their own are linked to it.

    Args:
        path: where the page is written; links are relative to it.
        refresh: seconds after which a browser loads the page again; 0 for never.

    Raises:
        OSError: metrics cannot be read.
    """
    runs = [_ShownRun(folder, series_of(metrics_in(folder.metrics_file))) for folder in folders]
    specs: Drawings = {}
    curves: list[tuple[str, str]] = []
    for number, metric in enumerate(_metrics(runs)):
        curves.append((f"curve-{number}", metric))
        specs[f"curve-{number}"] = partial(charts.compared, f"{metric} of each run over steps", _lines(metric, runs))
    context: dict[str, Any] = {
        "rows": [_row(run, path) for run in runs],
        "curves": curves,
        "made": time.time(),
    }
    return write_page("overview.html.j2", specs, context, refresh=refresh)


def _row(run: _ShownRun, page: Path) -> dict[str, Any]:
    series, state = run.series, run.folder.state
    newest = {name: column.last for name, column in series.columns.items()}
    headlines = labels.headlines(series.evaluations[-1][1], "eval") if series.evaluations else []
    headlines = headlines or labels.headlines(newest, "env", "rollout")
    report = run.folder.path / NAME
    return {
        "address": quote(os.path.relpath(report, page.parent)) if report.is_file() else "",
        "name": run.folder.path.name,
        "status": state.outcome[0],
        "step": state.step,
        "result": labels.figures_text(headlines),
        "slowest": _slowest(newest),
        "speed": "" if series.pace is None else labels.speed(series.pace),
    }


def _slowest(newest: Mapping[str, float]) -> str:
    """Return the phase that took longest in the last step, with its share."""
    step = newest.get("time/step", 0.0)
    phases = {name.removeprefix("time/"): value for name, value in newest.items() if name.startswith("time/")}
    phases = {name: value for name, value in phases.items() if "/" not in name and name != "step"}
    if not phases or step <= 0:
        return ""
    name = max(phases, key=lambda name: phases[name])
    return f"{labels.short_phase(name)} {phases[name] / step:.0%}"


def _metrics(runs: Sequence[_ShownRun]) -> list[str]:
    """Return the metrics whose curves are drawn: results first."""
    names = set[str]().union(*(run.series.columns for run in runs))
    wanted = [labels.headline_metric(names, space) for space in ("eval", "env", "rollout")]
    wanted += [name for name in ("train/actor/loss", "time/step") if name in names]
    return list(dict.fromkeys(name for name in wanted if name is not None))[:_MOST_CURVES]


def _lines(metric: str, runs: Sequence[_ShownRun]) -> list[tuple[str, int, Sequence[Band]]]:
    """Return the line of each run that has the metric: its name, the number of its colour, and its values."""
    return [
        (run.folder.path.name, number, run.series.columns[metric].bands())
        for number, run in enumerate(runs)
        if metric in run.series.columns
    ]
