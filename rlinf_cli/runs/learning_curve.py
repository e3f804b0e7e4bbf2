"""The learning curve of a run as a picture: return and success over steps, of training and of evaluation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlinf_core.errors import RunError
from rlinf_core.foreign.write_fault import write_fault
from rlinf_core.process.requirements import install_command, missing_modules
from rlinf_core.runners.metrics import Metrics, read_metrics
from rlinf_core.runners.storage import durable


class Panel(NamedTuple):
    """One part of the picture.

    Attributes:
        series: what each line is called, and the metrics that it may be, the first that a run has.
        share: whether values are between 0 and 1.
    """

    title: str
    series: tuple[tuple[str, tuple[str, ...]], ...]
    share: bool = False


class Line(NamedTuple):
    """The values of a metric over steps; those that are no number are left out."""

    label: str
    metric: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


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
# Readable for people who see colours differently (Okabe and Ito, 2008): training pale, evaluation strong.
_COLOURS: Final = {"train": "#56B4E9", "train, at end": "#56B4E9", "train, once": "#E69F00"}
_STRONG: Final = {"eval": "#0072B2", "eval, at end": "#0072B2", "eval, once": "#D55E00", "eval, pass@1": "#0072B2"}
# Beyond that many points a line is noise: its mean is drawn over it.
_SMOOTH_FROM: Final = 200
_MARKERS_UNTIL: Final = 60
# More points than a picture has columns say nothing more, and make an SVG of megabytes.
_MOST_POINTS: Final = 1000


def draw_curve(metrics_file: Path, folder: Path, title: str) -> tuple[Path, Path] | None:
    """Draw `curve.png` and `curve.svg` of `metrics.jsonl` into `folder`; those of before are replaced.

    Returns:
        The PNG and the SVG, or None where no metric to draw was written.

    Raises:
        RunError: matplotlib is not installed, the metrics cannot be read, or the pictures cannot be written.
    """
    try:
        metrics = read_metrics(metrics_file)
    except OSError as error:
        raise RunError(
            "the learning curve cannot be drawn", where=str(metrics_file), why=error.strerror or str(error)
        ) from error
    panels = [(panel, drawn) for panel in PANELS if (drawn := lines(panel, metrics))]
    if not panels:
        return None
    require_matplotlib("no learning curve was drawn")
    paths = folder / "curve.png", folder / "curve.svg"
    try:
        save_figure(_figure(panels, title), paths)
    except OSError as error:
        raise RunError(
            "the learning curve cannot be written", where=str(folder), why=write_fault(folder, error)
        ) from error
    except Exception as error:
        # From an unexpected version of matplotlib, for example. The run does not depend on the figure.
        raise RunError("the learning curve cannot be drawn", why=f"{type(error).__name__}: {error}") from error
    return paths


def require_matplotlib(what: str) -> None:
    """Raise a RunError stating that `what` failed if matplotlib is not installed."""
    if missing_modules(["matplotlib"]):
        raise RunError(
            what,
            why="this Python lacks the package `matplotlib`",
            help=f"run `{install_command('matplotlib')}`",
        )


def lines(panel: Panel, metrics: Sequence[Metrics]) -> list[Line]:
    """Return the lines of a panel; two of the same values, as where episodes end with success, are one."""
    drawn: list[Line] = []
    for label, names in panel.series:
        line = next((line for name in names if (line := _line(label, name, metrics)).steps), None)
        if line is None:
            continue
        twin = next((other for other in drawn if (other.steps, other.values) == (line.steps, line.values)), None)
        if twin is None:
            drawn.append(line)
    return drawn


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return centered moving averages over `window` values, fewer at the ends; same length as the input."""
    reach = window // 2
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    bounds = [(max(0, at - reach), min(len(values), at + reach + 1)) for at in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in bounds]


def _line(label: str, name: str, metrics: Sequence[Metrics]) -> Line:
    points = [(metric.step, value) for metric in metrics if math.isfinite(value := metric.metrics.get(name, math.nan))]
    return Line(label, name, tuple(step for step, _ in points), tuple(value for _, value in points))


def _figure(panels: Sequence[tuple[Panel, list[Line]]], title: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # No pyplot: that would open a display where there is one, and keep every figure.
    figure: Any = Figure(figsize=(5.6 * len(panels), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, parse_math=False)
    for axes, (panel, drawn) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for line in drawn:
            _draw(axes, line)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel("step")
        # Steps are whole, and a run of one step is a point in the middle.
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if len({step for line in drawn for step in line.steps}) == 1:
            only = drawn[0].steps[0]
            axes.set_xlim(only - 1, only + 1)
        if panel.share:
            axes.set_ylim(-0.03, 1.03)
        axes.grid(visible=True, alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=9, frameon=False)
    return figure


def _draw(axes: Any, line: Line) -> None:
    strong = line.label in _STRONG
    colour = _STRONG.get(line.label) or _COLOURS[line.label]
    marker = "o" if len(line.steps) <= _MARKERS_UNTIL and (strong or len(line.steps) == 1) else None
    style = {
        "color": colour,
        "label": line.label,
        "linewidth": 1.8 if strong else 1.2,
        "marker": marker,
        "markersize": 4,
    }
    steps, values = line.steps, line.values
    if len(values) >= _SMOOTH_FROM:
        window = 2 * (len(values) // 100) + 1
        raw = list(thinned(steps, values))
        axes.plot(*zip(*raw, strict=True), color=colour, alpha=0.3, linewidth=0.7)
        values = tuple(smoothed(values, window))
        style["linewidth"] = 1.8
        style["label"] = f"{line.label} (mean of {window})"
    axes.plot(*zip(*thinned(steps, values), strict=True), zorder=3 if strong else 2, **style)


def thinned(steps: Sequence[int], values: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Return about `_MOST_POINTS` points: the minimum and maximum of each stretch, so that no peak is lost."""
    stretch = max(1, math.ceil(2 * len(steps) / _MOST_POINTS))
    if stretch <= 2:
        yield from zip(steps, values, strict=True)
        return
    for start in range(0, len(steps), stretch):
        rows = range(start, min(start + stretch, len(steps)))
        for at in sorted({min(rows, key=values.__getitem__), max(rows, key=values.__getitem__)}):
            yield steps[at], values[at]


def save_figure(figure: Any, paths: Sequence[Path]) -> None:
    """Write the figure in the formats of the paths' suffixes; the same run gives the same files."""
    from importlib import import_module

    matplotlib: Any = import_module("matplotlib")
    # A letter that the font lacks is a box in the picture, and no news for the terminal.
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "rlinf"}):
        warnings.simplefilter("ignore")
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            picture = BytesIO()
            figure.savefig(picture, format=path.suffix[1:], dpi=150, metadata=metadata)
            # Somebody may be looking at the one of before.
            durable.write_whole(path, picture.getvalue())
