"""Charts of a page, as Vega-Lite specifications. Colours of text and lines are those of the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from rlinf_cli.report.series import Band, EvaluatedPoint
from rlinf_cli.report.trace_steps import TraceBar

Spec: TypeAlias = dict[str, Any]

# Okabe and Ito's palette, which people of every colour vision can tell apart.
PALETTE: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A8F98", "#B3A100")
_HEIGHT: Final = 220
_SMALL_HEIGHT: Final = 110
# Axis and legend of a chart with rows.
_AROUND: Final = 80
_SCHEMA: Final = "https://vega.github.io/schema/vega-lite/v6.json"
ROWS: Final = "rows"
_AXIS: Final = dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor", "gridColor"), "currentColor")
CONFIG: Final[Mapping[str, Any]] = {
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **_AXIS,
        "gridOpacity": 0.13,
        "domainOpacity": 0.4,
        "tickOpacity": 0.4,
        "titleFontWeight": "normal",
    },
    "legend": {"labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 12},
}
# Below this many steps, bars: an area over two points is meaningless.
_FEWEST_FOR_AREA: Final = 8


def curve(title: str, series: Mapping[str, Sequence[Band] | Sequence[EvaluatedPoint]], *, share: bool) -> Spec:
    """Return curves over steps: training as a mean with its band, evaluations with their intervals.

    Args:
        title: the title, also for screen readers.
        series: the series by the label of the line.
        share: whether values are between 0 and 1.
    """
    rows: list[Sequence[object]] = []
    for label, points in series.items():
        for point in points:
            if isinstance(point, Band):
                rows.append(("train", label, point.step, _number(point.mean), _number(point.low), _number(point.high)))
            else:
                low, high = _number(point.low), _number(point.high)
                rows.append(("eval", label, point.step, _number(point.value), low, high))
    scale = {"domain": [0, 1]} if share else {"zero": False}
    x = _quantity("step", title="step", axis={"tickMinStep": 1})
    # The legend symbol of a band would be as pale as the band.
    colour = _colour("series", list(series), {"orient": "top", "symbolOpacity": 1})
    value = {"x": x, "color": colour, "y": _quantity("value", title=None, scale=scale)}
    interval = {"x": x, "color": colour, "y": _quantity("low", title=None, scale=scale), "y2": {"field": "high"}}
    figures = [_quantity(name, format=".4g") for name in ("value", "low", "high")]
    train = [{"filter": "datum.kind === 'train'"}]
    evaluation = [{"filter": "datum.kind === 'eval'"}]
    layers: list[Spec] = []
    # The chart library warns about an empty layer.
    if any(row[0] == "train" for row in rows):
        layers.append(_layer("area", interval, train, opacity=0.25, line=False))
    if any(row[0] == "eval" and row[4] for row in rows):
        layers.append(_layer("rule", interval, evaluation, opacity=0.6, strokeWidth=2))
    layers.append(_layer("line", value, strokeWidth=2))
    if any(row[0] == "eval" for row in rows):
        layers.append(_layer("point", value, evaluation, filled=True, size=45))
    # Wide and transparent, so that hovering needs no precision.
    layers.append(
        _layer("point", {**value, "tooltip": [_name("series"), _quantity("step"), *figures]}, size=120, opacity=0)
    )
    data = _data(("kind", "series", "step", "value", "low", "high"), rows)
    return _finished({"layer": layers}, data, title, _HEIGHT)


def small_curve(title: str, bands: Sequence[Band]) -> Spec:
    """Return one metric over steps, small."""
    rows = [(band.step, _number(band.mean), _number(band.low), _number(band.high)) for band in bands]
    x = _quantity("step", title=None, axis={"tickMinStep": 1, "tickCount": 4})
    scale, axis = {"zero": False}, {"tickCount": 4, "format": "~g"}
    low = _quantity("low", title=None, scale=scale, axis=axis)
    value = _quantity("value", title=None, scale=scale, axis=axis)
    layers = [
        _layer("area", {"x": x, "y": low, "y2": {"field": "high"}}, opacity=0.25, color=PALETTE[0]),
        _layer("line", {"x": x, "y": value}, strokeWidth=1.5, color=PALETTE[0], point=len(rows) == 1),
    ]
    return _finished({"layer": layers}, _data(("step", "value", "low", "high"), rows), title, _SMALL_HEIGHT)


def stacked_over_steps(title: str, series: Mapping[str, Sequence[Band]]) -> Spec:
    """Return seconds by phase, stacked over steps."""
    rows = [(name, band.step, _number(band.mean)) for name, bands in series.items() for band in bands]
    longest = max((len(bands) for bands in series.values()), default=0)
    area = longest >= _FEWEST_FOR_AREA
    mark = {"type": "area", "opacity": 0.9} if area else {"type": "bar", "opacity": 0.9, "size": 24}
    encoding = {
        "x": {
            **_quantity("step", title="step", axis={"tickMinStep": 1, "labelOverlap": True}),
            "type": "quantitative" if area else "ordinal",
        },
        "y": _quantity("seconds", title="seconds a step", stack=True),
        "color": _colour("phase", list(series)),
        "tooltip": [_name("phase"), _quantity("step"), _quantity("seconds", format=".3g")],
    }
    return _finished({"mark": mark, "encoding": encoding}, _data(("phase", "step", "seconds"), rows), title, _HEIGHT)


def stacked_by_component(title: str, rows: Sequence[tuple[str, str, float]]) -> Spec:
    """Return seconds a step by component, stacked by what it did: (component, activity, seconds)."""
    components = list(dict.fromkeys(row[0] for row in rows))
    encoding = {
        "y": _name("component", title=None, sort=components),
        "x": _quantity("seconds", title="seconds a step, mean", stack=True, axis={"labelOverlap": True}),
        "color": _colour("activity", list(dict.fromkeys(row[1] for row in rows))),
        "tooltip": [_name("component"), _name("activity"), _quantity("seconds", format=".3g")],
    }
    data = _data(("component", "activity", "seconds"), [(a, b, _number(c)) for a, b, c in rows])
    return _finished({"mark": {"type": "bar"}, "encoding": encoding}, data, title, 34 * len(components) + _AROUND)


def timeline(title: str, bars: Sequence[TraceBar], seconds: float) -> Spec:
    """Return the timeline of one step; its time axis zooms."""
    # Longer bars first, so that what happened within them lies above.
    ordered = sorted(bars, key=lambda bar: -bar.seconds)
    rows = [
        (bar.process, bar.kind, bar.name[:80], _number(bar.start, 6), _number(bar.start + bar.seconds, 6),
         _number(bar.seconds * 1000))
        for bar in ordered
    ]  # fmt: skip
    kinds = [kind for kind in ("phase", "method", "timer", "wait", "transfer") if any(bar.kind == kind for bar in bars)]
    processes = sorted({bar.process for bar in bars}, key=_driver_first)
    encoding = {
        "y": _name("process", title=None, sort=processes),
        "yOffset": _name("kind", sort=kinds),
        "x": _quantity("start", title="seconds from the beginning of the step", scale={"domain": [0, seconds]}),
        "x2": {"field": "end"},
        "color": _colour("kind", kinds),
        # The outline keeps bars below a pixel visible.
        "stroke": _colour("kind", kinds),
        "tooltip": [_name("process"), _name("kind"), _name("name"), _quantity("ms", format=".4g")],
    }
    zoom = {
        "name": "zoom",
        "bind": "scales",
        "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"},
    }
    shape: Spec = {
        "mark": {"type": "bar", "clip": True, "strokeWidth": 0.5},
        "encoding": encoding,
        "params": [zoom],
    }
    height = 9 * len(processes) * max(1, len(kinds)) + _AROUND
    return _finished(shape, _data(("process", "kind", "name", "start", "end", "ms"), rows), title, height)


def compared(title: str, runs: Sequence[tuple[str, int, Sequence[Band]]]) -> Spec:
    """Return one metric of several runs, overlaid; each run is a label, a colour index and values."""
    rows = [(label, band.step, _number(band.mean)) for label, _, bands in runs for band in bands]
    colour = _colour("run", [label for label, _, _ in runs], {"orient": "top", "columns": 1, "labelLimit": 600})
    colour["scale"]["range"] = [PALETTE[number % len(PALETTE)] for _, number, _ in runs]
    few = max((len(bands) for _, _, bands in runs), default=0) < 30
    encoding = {
        "x": _quantity("step", title="step", axis={"tickMinStep": 1}),
        "y": _quantity("value", title=None, scale={"zero": False}),
        "color": colour,
        "tooltip": [_name("run"), _quantity("step"), _quantity("value", format=".4g")],
    }
    shape: Spec = {"mark": {"type": "line", "strokeWidth": 2, "point": few}, "encoding": encoding}
    return _finished(shape, _data(("run", "step", "value"), rows), title, 300)


class SetCurve(NamedTuple):
    """A curve of a comparison of sets of runs.

    Attributes:
        label: the legend's text, the same for all curves of a set.
        run: the name of the run; empty for the mean of several.
        place: the number of the set, and of its colour.
        kind: `set` for a strong line with its band, `run` for a thin one.
    """

    label: str
    run: str
    place: int
    kind: str
    bands: Sequence[Band]


def compared_sets(title: str, curves: Sequence[SetCurve]) -> Spec:
    """Return one metric of sets of runs: their means within their ranges, and each run as a thin line."""
    rows = [
        (curve.label, curve.run, curve.kind, band.step, *map(_number, band[1:]))
        for curve in curves
        for band in curve.bands
    ]
    places = {curve.label: curve.place for curve in curves}
    colour = _colour("set", list(places), {"orient": "top", "columns": 1, "labelLimit": 600, "symbolOpacity": 1})
    colour["scale"]["range"] = [PALETTE[place % len(PALETTE)] for place in places.values()]
    x, scale = _quantity("step", title="step", axis={"tickMinStep": 1}), {"zero": False}
    value = {"x": x, "y": _quantity("value", title=None, scale=scale), "color": colour, "detail": _name("run")}
    between = {**value, "y": _quantity("low", title=None, scale=scale), "y2": {"field": "high"}}
    strong, thin = ([{"filter": f"datum.kind === '{kind}'"}] for kind in ("set", "run"))
    layers = [_layer("area", between, strong, opacity=0.18, line=False)]
    if any(curve.kind == "run" for curve in curves):
        layers.append(_layer("line", value, thin, strokeWidth=0.6, opacity=0.4))
    few = max((len(curve.bands) for curve in curves), default=0) < 30
    layers.append(_layer("line", value, strong, strokeWidth=1.8, point=few))
    data = _data(("set", "run", "kind", "step", "value", "low", "high"), rows)
    return _finished({"layer": layers}, data, title, 300)


def _quantity(field: str, **options: object) -> Spec:
    return {"field": field, "type": "quantitative", **options}


def _name(field: str, **options: object) -> Spec:
    return {"field": field, "type": "nominal", **options}


def _layer(mark: str, encoding: Spec, transform: Sequence[Spec] = (), **options: object) -> Spec:
    layer: Spec = {"mark": {"type": mark, **options}, "encoding": encoding}
    return {**layer, "transform": list(transform)} if transform else layer


def _colour(field: str, domain: Sequence[str], legend: Mapping[str, object] | None = None) -> Spec:
    """Return a colour of each value, and the legend of them."""
    colours = [PALETTE[number % len(PALETTE)] for number in range(len(domain))]
    legend = legend or {"orient": "top", "columns": 4, "labelLimit": 400}
    return _name(field, title=None, scale={"domain": list(domain), "range": colours}, legend=legend)


def _data(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV, half the size of JSON."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return text.getvalue()


def _finished(shape: Spec, data: str, title: str, height: int) -> Spec:
    """Return a chart as a specification with the width of its container and the colours of its page."""
    return {
        "$schema": _SCHEMA,
        "config": CONFIG,
        **shape,
        "data": {"name": ROWS, "format": {"type": "csv"}},
        "datasets": {ROWS: data},
        "width": "container",
        "height": height,
        "description": title,
        "autosize": {"type": "fit", "contains": "padding"},
    }


def _number(value: float | None, digits: int = 5) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def _driver_first(process: str) -> tuple[bool, str, int]:
    name, _, rank = process.rpartition(":")
    return (process != "driver", name, int(rank) if rank.isdigit() else 0)
