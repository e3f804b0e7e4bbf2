"""Pages of several runs: side by side, a row and a curve of each; and compared."""

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
from rlinf_cli.report.charts import Curve
from rlinf_cli.report.curves import TALL, compared_curves
from rlinf_cli.report.page import BESIDE, TIME, Drawings, write_page
from rlinf_cli.report.report_writing import NAME
from rlinf_cli.runs.metric_columns import MetricColumn, RunSeries, newest_of, series_of
from rlinf_cli.runs.run_comparison import (
    Comparison,
    compared,
    difference_rows,
    first_difference,
    result_heads,
    run_rows,
    verdict_lines,
)
from rlinf_core.runners.metrics import metrics_in
from rlinf_core.runners.storage.run_folder import RunFolder

_MOST_CURVES: Final = 3


class _ShownRun(NamedTuple):
    """A run and its metrics."""

    folder: RunFolder
    series: RunSeries
    columns: Mapping[str, MetricColumn]


def overview_page(folders: Sequence[RunFolder], path: Path, *, refresh: int = 0) -> str:
    """Return the page of several runs as one file; runs with a report of their own are linked to it.

    Args:
        path: where the page is written; links are relative to it.
        refresh: seconds after which a browser loads the page again; 0 for never.

    Raises:
        OSError: metrics cannot be read.
    """
    every = [series_of(metrics_in(folder.metrics_file)) for folder in folders]
    runs = [_ShownRun(folder, series, series.finite()) for folder, series in zip(folders, every, strict=True)]
    specs: Drawings = {}
    curves: list[tuple[str, str]] = []
    for number, metric in enumerate(_metrics(runs)):
        curves.append((f"curve-{number}", metric))
        specs[f"curve-{number}"] = partial(
            charts.curves, f"{metric} of each run over steps", _lines(metric, runs), height=TALL
        )
    context: dict[str, Any] = {
        "rows": [_row(run, path) for run in runs],
        "curves": curves,
        "made": time.time(),
    }
    return write_page("overview.html.j2", specs, context, refresh=refresh)


def _row(run: _ShownRun, page: Path) -> dict[str, Any]:
    series, state = run.series, run.folder.state
    newest = newest_of(run.columns)
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
    step = newest.get(f"{TIME}step", 0.0)
    phases = {name.removeprefix(TIME): value for name, value in newest.items() if name.startswith(TIME)}
    phases = {name: value for name, value in phases.items() if "/" not in name and name not in BESIDE}
    if not phases or step <= 0:
        return ""
    name = max(phases, key=lambda name: phases[name])
    return f"{labels.short_phase(name)} {phases[name] / step:.0%}"


def _metrics(runs: Sequence[_ShownRun]) -> list[str]:
    """Return the metrics whose curves are drawn: results first."""
    names = set[str]().union(*(run.columns for run in runs))
    wanted = [labels.headline_metric(names, space) for space in ("eval", "env", "rollout")]
    wanted += [name for name in ("train/actor/loss", "time/step") if name in names]
    return list(dict.fromkeys(name for name in wanted if name is not None))[:_MOST_CURVES]


def _lines(metric: str, runs: Sequence[_ShownRun]) -> list[Curve]:
    """Return the line of each run that has the metric; a run has one colour in all charts."""
    return [
        Curve(run.folder.path.name, run.columns[metric].bands(), place=number)
        for number, run in enumerate(runs)
        if metric in run.columns
    ]


def compared_page(comparison: Comparison) -> str:
    """Return the page: results, overlaid curves, and differences, most important first."""
    context = {
        "count": sum(len(run_set.runs) for run_set in comparison.sets),
        "first": first_difference(comparison),
        "heads": result_heads(comparison),
        "runs": run_rows(comparison),
        "verdicts": verdict_lines(comparison),
        "curves": [("curve", comparison.metric)],
        "differences": difference_rows(comparison.differences),
        "compared": compared(comparison),
        "made": time.time(),
    }
    curve = partial(compared_curves, comparison, comparison.metric)
    return write_page("compare.html.j2", {"curve": curve}, context)
