"""Curves of results: the metrics that are drawn, and pictures of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from rlinf_cli.report import charts
from rlinf_cli.report.charts import Spec
from rlinf_cli.report.script import require_modules
from rlinf_cli.report.series import Band, Column, EvaluatedPoint, RunSeries, banded, evaluated, series_of
from rlinf_cli.runs.metric_comparison import Kind
from rlinf_cli.runs.run_comparison import Comparison, RunSet
from rlinf_core.errors import RunError
from rlinf_core.foreign.write_fault import write_fault
from rlinf_core.runners.metrics import metrics_in
from rlinf_core.runners.storage import durable

# Lines of a chart by their labels.
Curves: TypeAlias = dict[str, Sequence[Band] | Sequence[EvaluatedPoint]]
Points: TypeAlias = list[tuple[int, float]]
# Sets that differ in more keys are named by their runs.
_MOST_KEYS: Final = 2
_INK: Final = "#333333"
_SCALE: Final = 2.0
_FORMATS: Final = (".svg", ".png", ".pdf")


class Panel(NamedTuple):
    """A chart of results.

    Attributes:
        series: the label of each line, and the metrics that it may be: the first that a run has.
        share: whether values are between 0 and 1.
    """

    title: str
    series: tuple[tuple[str, tuple[str, ...]], ...]
    share: bool = False


PANELS: Final = (
    Panel("return", (("train", ("env/return", "rollout/reward")), ("eval", ("eval/return", "eval/reward")))),
    Panel(
        "success",
        (
            ("train, at end", ("env/success_at_end",)),
            ("train, once", ("env/success_once",)),
            ("eval, at end", ("eval/success_at_end",)),
            ("eval, once", ("eval/success_once",)),
            ("eval, pass@1", ("eval/pass@1",)),
        ),
        share=True,
    ),
)


def result_curves(series: RunSeries) -> list[tuple[Panel, Curves]]:
    """Return the charts of results that a run has, with their lines."""
    return [(panel, curves) for panel in PANELS if (curves := _curves(panel, series))]


def _curves(panel: Panel, series: RunSeries) -> Curves:
    curves: Curves = {}
    columns: list[Column] = []
    for label, names in panel.series:
        name = next((name for name in names if name in series.columns), None)
        if name is None:
            continue
        column = series.columns[name]
        # Two series with equal values are one line, as where success ends the episode.
        if any(column.is_like(other) for other in columns):
            continue
        columns.append(column)
        curves[label] = evaluated(name, series.evaluations) if name.startswith("eval/") else column.bands()
    return curves


def draw_curve(metrics_file: Path, folder: Path, title: str) -> tuple[Path, Path] | None:
    """Draw `curve.png` and `curve.svg` of `metrics.jsonl` into `folder`, and replace those of before.

    Returns:
        The PNG and the SVG, or None where no metric to draw was written.

    Raises:
        RLinfError: a package is not installed, the metrics cannot be read, or the pictures cannot be written.
    """
    try:
        series = series_of(metrics_in(metrics_file))
    except OSError as error:
        why = error.strerror or str(error)
        raise RunError("the learning curve cannot be drawn", where=str(metrics_file), why=why) from error
    panels = [
        _part(charts.curve(panel.title, curves, share=panel.share), panel.title, width=480)
        for panel, curves in result_curves(series)
    ]
    if not panels:
        return None
    require_modules("no learning curve was drawn")
    paths = folder / "curve.png", folder / "curve.svg"
    try:
        save_picture({"title": title, "hconcat": panels}, paths)
    except OSError as error:
        why = write_fault(folder, error)
        raise RunError("the learning curve cannot be written", where=str(folder), why=why) from error
    except Exception as error:
        # From an unexpected version of the library, for example. The run does not depend on the picture.
        raise RunError("the learning curve cannot be drawn", why=f"{type(error).__name__}: {error}") from error
    return paths


def draw_comparison(comparison: Comparison, path: Path, metrics: Sequence[str] = ()) -> None:
    """Draw metrics of all runs over steps; the extension of `path` selects the format.

    A set of several runs is drawn as their mean and a band from the lowest to the highest, with a thin line for each.

    Args:
        metrics: one for each chart; by default the compared one.

    Raises:
        RLinfError: no run has one of the metrics, a package is not installed, the format is unknown, or the file
            cannot be written.
    """
    require_modules("no curves were drawn")
    panels: list[Spec] = []
    for metric in tuple(dict.fromkeys(metrics)) or (comparison.metric,):
        runs = [curve for place in range(len(comparison.sets)) for curve in _set_curves(comparison, place, metric)]
        if not runs:
            raise RunError(f"no run has the metric `{metric}`", help="choose a name in metrics.jsonl with `--metric`")
        panels.append(_part(charts.compared_sets(f"{metric} over steps", runs), metric, width=640))
    try:
        save_picture({"vconcat": panels}, [path])
    except (OSError, ValueError) as error:
        raise RunError("the curves cannot be written", where=str(path), why=write_fault(path, error)) from error


def _set_curves(comparison: Comparison, place: int, metric: str) -> list[charts.SetCurve]:
    """Return the curves of a set of runs: the one of its only run, or all of them and their mean."""
    run_set = comparison.sets[place]
    curves = [(run.path.name, points) for run, points in zip(run_set.runs, _points(run_set, metric), strict=True)]
    curves = [(name, points) for name, points in curves if points]
    bands = [(name, banded([step for step, _ in points], [value for _, value in points])) for name, points in curves]
    if len(bands) < 2:
        return [charts.SetCurve(f"{run_set.label}  {name}", name, place, "set", lines) for name, lines in bands]
    label = f"{_name(comparison, place)}: mean and range of {len(bands)}"
    mean = [Band(*row) for row in mean_and_range([points for _, points in curves])]
    runs = [charts.SetCurve(label, name, place, "run", lines) for name, lines in bands]
    return [*runs, charts.SetCurve(label, "", place, "set", mean)]


def _points(run_set: RunSet, metric: str) -> list[Points]:
    """Return the finite values of each run."""
    pairs = ([(line.step, line.metrics.get(metric, math.nan)) for line in lines] for lines in run_set.metrics)
    return [[pair for pair in points if math.isfinite(pair[1])] for points in pairs]


def mean_and_range(curves: Sequence[Points]) -> list[tuple[int, float, float, float]]:
    """Return step, mean, lowest and highest value, at each step that all curves have; empty if they share none."""
    values = [dict(points) for points in curves]
    steps = sorted(set(values[0]).intersection(*values[1:])) if values else []
    columns = [(step, [value[step] for value in values]) for step in steps]
    return [(step, sum(column) / len(column), min(column), max(column)) for step, column in columns]


def _name(comparison: Comparison, place: int) -> str:
    """Return what a set differs in, as in `A  actor.optim.lr 0.001`, or the name of its first run."""
    run_set = comparison.sets[place]
    own = [difference for difference in comparison.differences if difference.kind is Kind.CONFIG]
    if len(comparison.sets) < 2 or not 0 < len(own) <= _MOST_KEYS:
        return f"{run_set.label}  {run_set.runs[0].path.name}"
    values = ", ".join(f"{difference.name} {difference.values[place]}" for difference in own)
    return f"{run_set.label}  {values}"


def _part(chart: Spec, title: str, *, width: int) -> Spec:
    """Return a chart as a part of a picture: with a title, rows and width of its own, and nothing to hover over."""
    left_out = ("$schema", "config", "datasets", "autosize")
    rows = {"values": chart["datasets"][charts.ROWS], "format": {"type": "csv"}}
    part = {name: value for name, value in chart.items() if name not in left_out}
    part["layer"] = [layer for layer in part["layer"] if layer["mark"].get("opacity") != 0]
    return {**part, "title": title, "data": rows, "width": width}


def save_picture(shape: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Write charts side by side or below each other, in the formats of the paths' suffixes.

    Args:
        shape: `hconcat` or `vconcat` with charts of `charts`, and a title.

    Raises:
        OSError: a file cannot be written.
        ValueError: a format is unknown.
    """
    import vl_convert

    library: Any = vl_convert
    unknown = [path.suffix for path in paths if path.suffix not in _FORMATS]
    if unknown:
        raise ValueError(f"`{unknown[0]}` is no format of pictures: use {', '.join(_FORMATS)}")
    # Pages have colours of their own, a picture is dark on white.
    own_legends = {"resolve": {"scale": {"color": "independent"}}}
    text = json.dumps({**shape, **own_legends, "background": "white", "config": charts.CONFIG, "padding": 12})
    svg: str = library.vegalite_to_svg(json.loads(text.replace('"currentColor"', f'"{_INK}"')))
    for path in paths:
        # Somebody may be looking at the one of before.
        durable.write_whole(path, _converted(library, svg, path.suffix))


def _converted(library: Any, svg: str, format: str) -> bytes:
    if format == ".png":
        return library.svg_to_png(svg, scale=_SCALE)
    return library.svg_to_pdf(svg) if format == ".pdf" else svg.encode()
