"""Curves of results: the choice of metrics, pictures of them, and the report beside them at the end of a run."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlinf_cli.console import COMMAND, reason
from rlinf_cli.report import charts
from rlinf_cli.report.charts import MODULES, Curve, Spec, require_modules
from rlinf_cli.runs.metric_columns import Band, MetricColumn, RunSeries, evaluated, series_of
from rlinf_cli.runs.metric_comparison import Kind
from rlinf_cli.runs.run_comparison import Comparison
from rlinf_core import env_vars
from rlinf_core.errors import EnvironmentVariableError, RunError
from rlinf_core.foreign.files import write_fault
from rlinf_core.process.requirements import install_command, missing_modules
from rlinf_core.runners.metrics import mean, metrics_in
from rlinf_core.runners.storage import durable

# Sets that differ in more keys are named after their runs.
_MOST_KEYS: Final = 2
_INK: Final = "#333333"
_SCALE: Final = 2.0
_FORMATS: Final = (".svg", ".png", ".pdf")
TALL: Final = 300
NAME: Final = "report.html"
# The first report of an installation bundles the chart library's code, which takes seconds.
PATIENCE_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.05


class Panel(NamedTuple):
    """A chart of results.

    Attributes:
        series: the label of each line with its possible metrics; the first metric that a run has is drawn.
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


def result_curves(series: RunSeries) -> list[tuple[Panel, list[Curve]]]:
    """Return the charts of results for which a run has metrics, with their lines."""
    return [(panel, curves) for panel in PANELS if (curves := _curves(panel, series))]


def _curves(panel: Panel, series: RunSeries) -> list[Curve]:
    curves: list[Curve] = []
    columns: list[MetricColumn] = []
    for label, names in panel.series:
        name = next((name for name in names if name in series.columns), "")
        column = series.columns.get(name, MetricColumn()).finite()
        # Two series with equal values are drawn as one line, as for metrics of success if success ends the episode.
        if not len(column) or column in columns:
            continue
        columns.append(column)
        kind = "eval" if name.startswith("eval/") else "mean"
        bands = evaluated(name, series.evaluations) if kind == "eval" else column.bands()
        curves.append(Curve(label, bands, kind))
    return curves


def draw_curve(metrics_file: Path, folder: Path, title: str) -> tuple[Path, Path] | None:
    """Draw `curve.png` and `curve.svg` of `metrics.jsonl` into `folder`, and replace existing ones.

    Returns:
        The paths of the PNG and the SVG, or None if the file has no metric to draw.

    Raises:
        RLinfError: a package is not installed, the metrics cannot be read, or the pictures cannot be written.
    """
    try:
        series = series_of(metrics_in(metrics_file))
    except OSError as error:
        why = error.strerror or str(error)
        raise RunError("the learning curve cannot be drawn", where=str(metrics_file), why=why) from error
    panels = [
        _part(charts.curves(panel.title, curves, share=panel.share), panel.title, width=480)
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
        # An unexpected version of the library may fail in any way, and the run does not depend on the picture.
        raise RunError("the learning curve cannot be drawn", why=f"{type(error).__name__}: {error}") from error
    return paths


def draw_comparison(comparison: Comparison, path: Path, metrics: Sequence[str] = ()) -> None:
    """Draw metrics of all runs; the extension of `path` selects the format.

    Args:
        metrics: the metric of each chart; by default the compared metric only.

    Raises:
        RLinfError: no run has one of the metrics, a package is not installed, the format is unknown, or the file
            cannot be written.
    """
    require_modules("no curves were drawn")
    names = tuple(dict.fromkeys(metrics)) or (comparison.metric,)
    panels = [_part(compared_curves(comparison, metric), metric, width=640) for metric in names]
    try:
        save_picture({"vconcat": panels}, [path])
    except (OSError, ValueError) as error:
        raise RunError("the curves cannot be written", where=str(path), why=write_fault(path, error)) from error


def compared_curves(comparison: Comparison, metric: str) -> Spec:
    """Return the chart of a metric of all runs.

    A set of several runs is drawn as their mean, a band from the lowest to the highest, and a thin line for each run.

    Raises:
        RunError: no run has the metric.
    """
    lines = [curve for place in range(len(comparison.sets)) for curve in _set_curves(comparison, place, metric)]
    if not lines:
        raise RunError(f"no run has the metric `{metric}`", help="choose a name in metrics.jsonl with `--metric`")
    x = comparison.x
    return charts.curves(f"{metric} of each run over {x.words}", lines, x=x.label, height=TALL)


def _set_curves(comparison: Comparison, place: int, metric: str) -> list[Curve]:
    """Return the curves of a set of runs: a curve for each run and, for several runs, their mean."""
    run_set = comparison.sets[place]
    columns = [
        (run.folder.path.name, column, comparison.x.of(run.series))
        for run in run_set.runs
        if (column := run.series.finite.get(metric)) is not None
    ]
    bands = [(name, [band._replace(step=x[int(band.step)]) for band in column.bands()]) for name, column, x in columns]
    if len(columns) < 2:
        return [Curve(f"{run_set.label}  {name}", lines, place=place, name=name) for name, lines in bands]
    label = f"{_name(comparison, place)}: mean and range of {len(columns)}"
    average = mean_and_range([column for _, column, _ in columns], [x for _, _, x in columns])
    return [*(Curve(label, lines, "run", place, name) for name, lines in bands), Curve(label, average, place=place)]


def mean_and_range(columns: Sequence[MetricColumn], x: Sequence[Mapping[int, float]]) -> list[Band]:
    """Return mean, lowest and highest value at each step that all columns have, at the step's mean position in `x`."""
    by_step = [dict(zip(column.steps, column.values, strict=True)) for column in columns]
    bands: list[Band] = []
    for step in sorted(set(by_step[0]).intersection(*by_step[1:])):
        values = [value[step] for value in by_step]
        bands.append(Band(mean([place[step] for place in x]), mean(values), min(values), max(values)))
    return bands


def _name(comparison: Comparison, place: int) -> str:
    """Return a set's label and distinguishing values, as in `A  actor.optim.lr 0.001`, or its first run's name."""
    run_set = comparison.sets[place]
    own = [difference for difference in comparison.differences if difference.kind is Kind.CONFIG]
    if len(comparison.sets) < 2 or not 0 < len(own) <= _MOST_KEYS:
        return f"{run_set.label}  {run_set.runs[0].folder.path.name}"
    values = ", ".join(f"{difference.name} {difference.values[place]}" for difference in own)
    return f"{run_set.label}  {values}"


def _part(chart: Spec, title: str, *, width: int) -> Spec:
    """Return a chart as part of a picture: with its own title, rows and width, without hover texts."""
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
    # A page defines its own colors; a picture is dark on white.
    own_legends = {"resolve": {"scale": {"color": "independent"}}}
    text = json.dumps({**shape, **own_legends, "background": "white", "config": charts.CONFIG, "padding": 12})
    svg: str = library.vegalite_to_svg(json.loads(text.replace('"currentColor"', f'"{_INK}"')))
    for path in paths:
        content = svg.encode()
        if path.suffix != ".svg":
            content = library.svg_to_png(svg, scale=_SCALE) if path.suffix == ".png" else library.svg_to_pdf(svg)
        # Replace an existing picture atomically, because it may be open in a viewer.
        durable.write_whole(path, content)


def write_report_at_end(folder: Path, warn: Callable[[str], None], stopped: Callable[[], bool]) -> Path | None:
    """Write `report.html` into the run folder; return its path, or None after calling `warn`.

    Args:
        folder: the folder of a finished run.
        warn: called with the reason if no report is written.
        stopped: polled; True if the user wants the command to end now.
    """
    try:
        if not env_vars.REPORT.get():
            return None
    except EnvironmentVariableError as error:
        warn(f"no report: {error.message}")
        return None
    missing = missing_modules(MODULES)
    if missing:
        warn(f"no report: packages are missing; `{install_command(*missing)}` installs them")
        return None
    try:
        process = subprocess.Popen(
            [*COMMAND, "report", str(folder), "--quiet"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        warn(f"no report: {error}")
        return None
    with process:
        why = _wait(process, stopped)
        stderr = b"" if why is not None or process.stderr is None else process.stderr.read()
    path = folder / NAME
    if why is None and process.returncode == 0 and path.exists():
        return path
    why = why or reason(stderr.decode(errors="replace"), process.returncode)
    warn(f"no report: {why}; `rlinf report {shlex.quote(str(folder))}` tries again")
    return None


def _wait(process: subprocess.Popen[bytes], stopped: Callable[[], bool]) -> str | None:
    """Wait for a process; return why it was terminated, or None if it ended on its own."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None:
        late = time.monotonic() > deadline
        if late or stopped():
            process.kill()
            process.wait()
            return f"it took longer than {PATIENCE_SECONDS:.0f} s" if late else "interrupted"
        time.sleep(_LOOK_SECONDS)
    return None
