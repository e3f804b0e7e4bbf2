"""The figure of `rlinf compare`: a panel for each metric, a colour for each set of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rlinf_cli.runs.learning_curve import require_matplotlib, save_figure, thinned
from rlinf_cli.runs.metric_comparison import Kind
from rlinf_cli.runs.run_comparison import Comparison, RunSet
from rlinf_core.errors import RunError
from rlinf_core.foreign.write_fault import write_fault

Points = list[tuple[int, float]]
_PANEL_HEIGHT: Final = 3.6
# Sets that differ in more keys are named by their runs.
_MOST_KEYS: Final = 2


def draw(comparison: Comparison, path: Path, metrics: Sequence[str] = ()) -> None:
    """Draw metrics of all runs over steps; the extension of `path` selects the format.

    A set of several runs is drawn as their mean and a band from the lowest to the highest, with a thin line for each.

    Args:
        metrics: one for each panel; by default the compared one.

    Raises:
        RunError: no run has one of the metrics, matplotlib is not installed, the format is unknown, or the file cannot
            be written.
    """
    require_matplotlib("no curves were drawn")
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = tuple(dict.fromkeys(metrics)) or (comparison.metric,)
    figure: Any = Figure(figsize=(8.0, 0.9 + _PANEL_HEIGHT * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    palette: Any = colormaps["tab10"]
    for axes, metric in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        curves = [(run_set, _curves(run_set, metric)) for run_set in comparison.sets]
        if not any(any(points) for _, points in curves):
            raise RunError(f"no run has the metric `{metric}`", help="choose a name in metrics.jsonl with `--metric`")
        for place, (run_set, points) in enumerate(curves):
            _draw_set(axes, run_set, points, palette(place % palette.N), _name(comparison, place))
        axes.set_title(metric, fontsize=10)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=True, alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    try:
        save_figure(figure, [path])
    except (OSError, ValueError) as error:
        raise RunError("the curves cannot be written", where=str(path), why=write_fault(path, error)) from error


def mean_and_range(curves: Sequence[Points]) -> list[tuple[int, float, float, float]]:
    """Return step, mean, lowest and highest value, at each step that all curves have; empty if they share none."""
    values = [dict(points) for points in curves]
    steps = sorted(set(values[0]).intersection(*values[1:])) if values else []
    columns = [(step, [value[step] for value in values]) for step in steps]
    return [(step, sum(column) / len(column), min(column), max(column)) for step, column in columns]


def _curves(run_set: RunSet, metric: str) -> list[Points]:
    """Return the finite values of each run that has any."""
    pairs = ([(line.step, line.metrics.get(metric, math.nan)) for line in lines] for lines in run_set.metrics)
    return [[pair for pair in points if math.isfinite(pair[1])] for points in pairs]


def _name(comparison: Comparison, place: int) -> str:
    """Return what a set differs in, as in `A  actor.optim.lr 0.001`, or the name of its first run."""
    run_set = comparison.sets[place]
    own = [difference for difference in comparison.differences if difference.kind is Kind.CONFIG]
    if len(comparison.sets) < 2 or not 0 < len(own) <= _MOST_KEYS:
        return f"{run_set.label}  {run_set.runs[0].path.name}"
    values = ", ".join(f"{difference.name} {difference.values[place]}" for difference in own)
    return f"{run_set.label}  {values}"


def _draw_set(axes: Any, run_set: RunSet, curves: Sequence[Points], color: Any, name: str) -> None:
    drawn = [points for points in curves if points]
    band = mean_and_range(drawn) if len(drawn) > 1 else []
    for run, points in zip(run_set.runs, curves, strict=True):
        if not points:
            continue
        steps, values = zip(*thinned(*map(tuple, zip(*points, strict=True))), strict=True)
        if band:
            axes.plot(steps, values, color=color, linewidth=0.6, alpha=0.4)
        else:
            axes.plot(steps, values, color=color, linewidth=1.3, label=f"{run_set.label}  {run.path.name}")
    if band:
        steps, means, lowest, highest = zip(*band, strict=True)
        label = f"{name}: mean and range of {len(drawn)}"
        axes.plot(steps, means, color=color, linewidth=1.8, label=label)
        axes.fill_between(steps, lowest, highest, color=color, alpha=0.18, linewidth=0)
