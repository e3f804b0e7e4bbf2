"""Charts as Vega-Lite specifications, and the JavaScript library that draws them on a page."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from rlinf_cli.runs.metric_columns import Band
from rlinf_core.errors import RLinfError
from rlinf_core.process.requirements import install_command, missing_modules

# Modules that a report needs.
MODULES: Final = ("jinja2", "vl_convert")


def require_modules(what: str, modules: Sequence[str] = MODULES) -> None:
    """Check that the packages for HTML pages are installed.

    Args:
        what: the error message, as in `no report was written`.
        modules: the modules that the page needs.

    Raises:
        RLinfError: a module is missing.
    """
    if missing := missing_modules(modules):
        listed = ", ".join(f"`{name}`" for name in missing)
        raise RLinfError(
            what,
            why=f"this Python does not have {listed}",
            help=f"run `{install_command(*missing)}`, or install rlinf-cli[report], which has all that pages need",
        )


def chart_script() -> str:
    """Return the JavaScript that draws Vega-Lite charts, as `window.vegaEmbed`.

    Bundling takes seconds, so the result is cached in the user's cache folder for each version of the libraries.
    """
    import vl_convert

    library: Any = vl_convert
    version: str = library.get_vegalite_versions()[-1]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    kept = Path(home) / "rlinf" / f"charts-{library.__version__}-{version}.js"
    try:
        return kept.read_text(encoding="utf-8")
    except OSError:
        text = _inlinable(str(library.javascript_bundle(vl_version=version)))
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = kept.with_name(f".{kept.name}.{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(kept)
    except OSError:
        # Without a cache, the next page bundles the code again.
        pass
    return text


def _inlinable(script: str) -> str:
    """Return JavaScript whose strings cannot end the enclosing `script` element."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


Spec: TypeAlias = dict[str, Any]

# Okabe and Ito's palette, which color-blind readers can distinguish as well.
PALETTE: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A8F98", "#B3A100")
_HEIGHT: Final = 220
_SMALL_HEIGHT: Final = 110
# The height of the axis and the legend of a chart with rows.
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
# A curve with fewer points has a mark at each point.
_FEW_POINTS: Final = 30
# Fewer steps are drawn as bars, because an area over two points is meaningless.
_FEWEST_FOR_AREA: Final = 8


class Curve(NamedTuple):
    """A line of a chart.

    Attributes:
        label: the legend's text; lines with equal labels have the same color.
        bands: its points.
        kind: `mean` for a strong line within its band, `eval` for points with their intervals, `run` for a thin line.
        place: the number of its color; by default the number of its label.
        name: an additional name, shown with the label.
    """

    label: str
    bands: Sequence[Band]
    kind: str = "mean"
    place: int | None = None
    name: str = ""


def curves(
    title: str,
    lines: Sequence[Curve],
    *,
    share: bool = False,
    x: str = "step",
    small: bool = False,
    height: int = _HEIGHT,
) -> Spec:
    """Return metrics over steps.

    Args:
        title: the title, also for screen readers.
        lines: the lines; bands of a single value have no area.
        share: whether values are between 0 and 1.
        x: the title of the horizontal axis.
        small: whether to leave out the legend and the titles, for a chart among many.
    """
    rows = [
        (curve.kind, curve.label, _number(band.step, 9), *map(_number, band[1:]), curve.name)
        for curve in lines
        for band in curve.bands
    ]
    kinds = {curve.kind for curve in lines}
    places = {curve.label: curve.place for curve in lines}
    labels = {label: number if place is None else place for number, (label, place) in enumerate(places.items())}
    many = any(len(label) > 20 for label in labels)
    # By default the legend symbol of a band would be as pale as the band.
    legend = {"orient": "top", "symbolOpacity": 1, **({"columns": 1, "labelLimit": 600} if many else {})}
    colour = _colour("series", list(labels), legend)
    colour["scale"]["range"] = [PALETTE[place % len(PALETTE)] for place in labels.values()]
    if small:
        colour["legend"] = None
    ticks = {"tickCount": 4} if small else {}
    along = _quantity("step", title=None if small else x, axis={**({"tickMinStep": 1} if x == "step" else {}), **ticks})
    scale = {"domain": [0, 1]} if share else {"zero": False}
    up: Spec = {"title": None, "scale": scale, **({"axis": {**ticks, "format": "~g"}} if small else {})}
    value = {"x": along, "y": _quantity("value", **up), "color": colour, "detail": _name("name")}
    interval = {**value, "y": _quantity("low", **up), "y2": {"field": "high"}}
    strong, thin, points = ([{"filter": f"datum.kind {test}"}] for test in ("=== 'mean'", "=== 'run'", "=== 'eval'"))
    few = max((len(curve.bands) for curve in lines), default=0) < _FEW_POINTS
    # The chart library warns about an empty layer.
    layers: list[Spec] = []
    if "mean" in kinds:
        layers.append(_layer("area", interval, strong, opacity=0.2, line=False))
    if any(band.low is not None for curve in lines if curve.kind == "eval" for band in curve.bands):
        layers.append(_layer("rule", interval, points, opacity=0.6, strokeWidth=2))
    if "run" in kinds:
        layers.append(_layer("line", value, thin, strokeWidth=0.6, opacity=0.4))
    dots = len(rows) == 1 or (few and not small and "eval" not in kinds)
    layers.append(_layer("line", value, [{"filter": "datum.kind !== 'run'"}], strokeWidth=1.8, point=dots))
    if "eval" in kinds:
        layers.append(_layer("point", value, points, filled=True, size=45))
    if not small:
        # Large transparent points make it easy to hover over a line.
        figures = [_quantity(name, format=".4g") for name in ("value", "low", "high")]
        tooltip = [_name("series"), _name("name"), _quantity("step"), *figures]
        layers.append(_layer("point", {**value, "tooltip": tooltip}, size=120, opacity=0))
    data = _data(("kind", "series", "step", "value", "low", "high", "name"), rows)
    return _finished({"layer": layers}, data, title, _SMALL_HEIGHT if small else height)


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
    """Return the seconds a step of each component, stacked by activity; a row is (component, activity, seconds)."""
    components = list(dict.fromkeys(row[0] for row in rows))
    encoding = {
        "y": _name("component", title=None, sort=components),
        "x": _quantity("seconds", title="seconds a step, mean", stack=True, axis={"labelOverlap": True}),
        "color": _colour("activity", list(dict.fromkeys(row[1] for row in rows))),
        "tooltip": [_name("component"), _name("activity"), _quantity("seconds", format=".3g")],
    }
    data = _data(("component", "activity", "seconds"), [(a, b, _number(c)) for a, b, c in rows])
    return _finished({"mark": {"type": "bar"}, "encoding": encoding}, data, title, 34 * len(components) + _AROUND)


def _quantity(field: str, **options: object) -> Spec:
    return {"field": field, "type": "quantitative", **options}


def _name(field: str, **options: object) -> Spec:
    return {"field": field, "type": "nominal", **options}


def _layer(mark: str, encoding: Spec, transform: Sequence[Spec] = (), **options: object) -> Spec:
    layer: Spec = {"mark": {"type": mark, **options}, "encoding": encoding}
    return {**layer, "transform": list(transform)} if transform else layer


def _colour(field: str, domain: Sequence[str], legend: Mapping[str, object] | None = None) -> Spec:
    """Return the encoding that gives each value a color, with its legend."""
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
    """Return a chart as a specification with the width of its container and the colors of its page."""
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
