"""The page of a comparison of runs."""

from __future__ import annotations

import math
import time
from functools import partial

from rlinf_cli.render.comparison_table import compared, difference_rows, first_difference, run_rows, verdict_lines
from rlinf_cli.report import charts
from rlinf_cli.report.page import comparison_page
from rlinf_cli.report.series import Band, banded
from rlinf_cli.runs.run_comparison import Comparison


def compared_page(comparison: Comparison) -> str:
    """Return the page: results, overlaid curves, and differences, most important first."""
    runs: list[tuple[str, int, list[Band]]] = []
    for place, run_set in enumerate(comparison.sets):
        for run, lines in zip(run_set.runs, run_set.metrics, strict=True):
            points = [(line.step, line.metrics.get(comparison.metric, math.nan)) for line in lines]
            points = [point for point in points if math.isfinite(point[1])]
            bands = banded([step for step, _ in points], [value for _, value in points])
            runs.append((f"{run_set.label}  {run.path.name}", place, bands))
    context = {
        "count": sum(len(run_set.runs) for run_set in comparison.sets),
        "first": first_difference(comparison),
        "metric": comparison.metric,
        "runs": run_rows(comparison),
        "verdicts": verdict_lines(comparison),
        "curves": [("curve", comparison.metric)],
        "differences": difference_rows(comparison.differences),
        "compared": compared(comparison),
        "made": time.time(),
    }
    return comparison_page(
        context, {"curve": partial(charts.compared, f"{comparison.metric} of each run over steps", runs)}
    )
