"""Charts of a page, as Vega-Lite specifications that Altair makes. Colours of text and lines are those of the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from rlinf_cli.report.series import Band, EvaluatedPoint
from rlinf_cli.report.trace_steps import TraceBar

Spec: TypeAlias = dict[str, Any]

# Okabe and Ito's palette, which people of every colour vision can tell apart.
PALETTE: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A8F98", "#B3A100")
_HEIGHT: Final = 220
_SMALL_HEIGHT: Final = 110
# Axis and legend of a chart with rows.
_AROUND: Final = 80
_FONT: Final = "system-ui, sans-serif"
# Below this many steps, bars: an area over two points is meaningless.
_FEWEST_FOR_AREA: Final = 8


def curve(title: str, series: Mapping[str, Sequence[Band] | Sequence[EvaluatedPoint]], *, share: bool) -> Spec:
    """Return curves over steps: training as a mean with its band, evaluations with their intervals.

    Args:
        title: the title, also for screen readers.
        series: by the label of the line.
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
    alt = _altair()
    scale = alt.Scale(domain=[0, 1]) if share else alt.Scale(zero=False)
    base = alt.Chart(_data(("kind", "series", "step", "value", "low", "high"), rows)).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1)),
        color=alt.Color(
            "series:N",
            title=None,
            scale=alt.Scale(domain=list(series), range=list(PALETTE[: len(series)])),
            # The legend symbol of a band would be as pale as the band.
            legend=alt.Legend(orient="top", symbolOpacity=1),
        ),
    )
    value = alt.Y("value:Q", title=None, scale=scale)
    tooltip = ["series:N", "step:Q", *(alt.Tooltip(f"{name}:Q", format=".4g") for name in ("value", "low", "high"))]
    train, evaluation = alt.datum.kind == "train", alt.datum.kind == "eval"
    interval = {"y": alt.Y("low:Q", title=None, scale=scale), "y2": "high:Q"}
    layers: list[Any] = []
    # The chart library warns about an empty layer.
    if any(row[0] == "train" for row in rows):
        layers.append(base.transform_filter(train).mark_area(opacity=0.25, line=False).encode(**interval))
    if any(row[0] == "eval" and row[4] for row in rows):
        layers.append(base.transform_filter(evaluation).mark_rule(opacity=0.6, strokeWidth=2).encode(**interval))
    layers.append(base.mark_line(strokeWidth=2).encode(y=value))
    if any(row[0] == "eval" for row in rows):
        layers.append(base.transform_filter(evaluation).mark_point(filled=True, size=45).encode(y=value))
    # Wide and transparent, so that hovering needs no precision.
    layers.append(base.mark_point(size=120, opacity=0).encode(y=value, tooltip=tooltip))
    return _finished(alt.layer(*layers), title, _HEIGHT)


def small_curve(title: str, bands: Sequence[Band]) -> Spec:
    """Return one metric over steps, small."""
    alt = _altair()
    rows = [(band.step, _number(band.mean), _number(band.low), _number(band.high)) for band in bands]
    base = alt.Chart(_data(("step", "value", "low", "high"), rows)).encode(
        x=alt.X("step:Q", title=None, axis=alt.Axis(tickMinStep=1, tickCount=4))
    )
    scale = alt.Scale(zero=False)
    axis = alt.Axis(tickCount=4, format="~g")
    layers = (
        base.mark_area(opacity=0.25, color=PALETTE[0]).encode(
            y=alt.Y("low:Q", title=None, scale=scale, axis=axis), y2="high:Q"
        ),
        base.mark_line(strokeWidth=1.5, color=PALETTE[0], point=len(rows) == 1).encode(
            y=alt.Y("value:Q", title=None, scale=scale, axis=axis)
        ),
    )
    return _finished(alt.layer(*layers), title, _SMALL_HEIGHT)


def stacked_over_steps(title: str, series: Mapping[str, Sequence[Band]]) -> Spec:
    """Return seconds by phase, stacked over steps."""
    alt = _altair()
    rows = [(name, band.step, _number(band.mean)) for name, bands in series.items() for band in bands]
    longest = max((len(bands) for bands in series.values()), default=0)
    chart = alt.Chart(_data(("phase", "step", "seconds"), rows))
    area = longest >= _FEWEST_FOR_AREA
    marked = chart.mark_area(opacity=0.9) if area else chart.mark_bar(opacity=0.9, size=24)
    x = alt.X("step:Q" if area else "step:O", title="step", axis=alt.Axis(tickMinStep=1, labelOverlap=True))
    return _finished(
        marked.encode(
            x=x,
            y=alt.Y("seconds:Q", title="seconds a step", stack=True),
            color=_by("phase", list(series)),
            tooltip=["phase:N", "step:Q", alt.Tooltip("seconds:Q", format=".3g")],
        ),
        title,
        _HEIGHT,
    )


def stacked_by_component(title: str, rows: Sequence[tuple[str, str, float]]) -> Spec:
    """Return seconds a step by component, stacked by what it did: (component, activity, seconds)."""
    alt = _altair()
    chart = alt.Chart(_data(("component", "activity", "seconds"), [(a, b, _number(c)) for a, b, c in rows]))
    return _finished(
        chart.mark_bar().encode(
            y=alt.Y("component:N", title=None, sort=list(dict.fromkeys(row[0] for row in rows))),
            x=alt.X("seconds:Q", title="seconds a step, mean", stack=True, axis=alt.Axis(labelOverlap=True)),
            color=_by("activity", list(dict.fromkeys(row[1] for row in rows))),
            tooltip=["component:N", "activity:N", alt.Tooltip("seconds:Q", format=".3g")],
        ),
        title,
        34 * len({row[0] for row in rows}) + _AROUND,
    )


def timeline(title: str, bars: Sequence[TraceBar], seconds: float) -> Spec:
    """Return the timeline of one step; its time axis zooms."""
    alt = _altair()
    # Longer bars first, so that what happened within them lies above.
    ordered = sorted(bars, key=lambda bar: -bar.seconds)
    rows = [
        (bar.process, bar.kind, bar.name[:80], _number(bar.start, 6), _number(bar.start + bar.seconds, 6),
         _number(bar.seconds * 1000))
        for bar in ordered
    ]  # fmt: skip
    kinds = [kind for kind in ("phase", "method", "timer", "wait", "transfer") if any(bar.kind == kind for bar in bars)]
    zoom = alt.selection_interval(bind="scales", encodings=["x"], zoom="wheel![event.shiftKey]")
    chart = alt.Chart(_data(("process", "kind", "name", "start", "end", "ms"), rows))
    return _finished(
        chart.mark_bar(clip=True, strokeWidth=0.5)
        .encode(
            y=alt.Y("process:N", title=None, sort=sorted({bar.process for bar in bars}, key=_driver_first)),
            yOffset=alt.YOffset("kind:N", sort=kinds),
            x=alt.X("start:Q", title="seconds from the beginning of the step", scale=alt.Scale(domain=[0, seconds])),
            x2="end:Q",
            color=_by("kind", kinds),
            # The outline keeps bars below a pixel visible.
            stroke=alt.Stroke(**_scale("kind", kinds)),
            tooltip=["process:N", "kind:N", "name:N", alt.Tooltip("ms:Q", format=".4g")],
        )
        .add_params(zoom),
        title,
        9 * len({bar.process for bar in bars}) * max(1, len(kinds)) + _AROUND,
    )


def compared(title: str, runs: Sequence[tuple[str, int, Sequence[Band]]]) -> Spec:
    """Return one metric of several runs, overlaid; each run is a label, a colour index and values."""
    alt = _altair()
    rows = [(label, band.step, _number(band.mean)) for label, _, bands in runs for band in bands]
    labels = [label for label, _, _ in runs]
    colours = [PALETTE[colour % len(PALETTE)] for _, colour, _ in runs]
    chart = alt.Chart(_data(("run", "step", "value"), rows))
    return _finished(
        chart.mark_line(strokeWidth=2, point=max((len(bands) for _, _, bands in runs), default=0) < 30).encode(
            x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False)),
            color=alt.Color(
                "run:N",
                title=None,
                scale=alt.Scale(domain=labels, range=colours),
                legend=alt.Legend(orient="top", columns=1, labelLimit=600),
            ),
            tooltip=["run:N", "step:Q", alt.Tooltip("value:Q", format=".4g")],
        ),
        title,
        300,
    )


def _altair() -> Any:
    """Return the module untyped: its types do not satisfy pyright."""
    import altair

    return altair


def _by(name: str, domain: Sequence[str]) -> Any:
    return _altair().Color(**_scale(name, domain))


def _scale(name: str, domain: Sequence[str]) -> dict[str, Any]:
    """Return a colour of each value, and the legend of them."""
    alt = _altair()
    colours = [PALETTE[number % len(PALETTE)] for number in range(len(domain))]
    return {
        "shorthand": f"{name}:N",
        "title": None,
        "scale": alt.Scale(domain=list(domain), range=colours),
        "legend": alt.Legend(orient="top", columns=4, labelLimit=400),
    }


def _data(names: Sequence[str], rows: Iterable[Sequence[object]]) -> Any:
    """Return rows as CSV, half the size of JSON."""
    alt = _altair()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return alt.InlineData(values=text.getvalue(), format=alt.DataFormat({"type": "csv"}))


def _finished(chart: Any, title: str, height: int) -> Spec:
    """Return a chart as a specification with the width of its container and the colours of its page."""
    alt, text = _altair(), "currentColor"
    sized = chart.properties(
        width="container",
        height=height,
        description=title,
        autosize=alt.AutoSizeParams(type="fit", contains="padding"),
    )
    specification = sized.configure(
        background="transparent",
        font=_FONT,
        view={"stroke": None},
        axis={
            "labelColor": text, "titleColor": text, "domainColor": text, "tickColor": text, "gridColor": text,
            "gridOpacity": 0.13, "domainOpacity": 0.4, "tickOpacity": 0.4, "titleFontWeight": "normal",
        },
        legend={"labelColor": text, "titleColor": text, "labelFontSize": 12},
    )  # fmt: skip
    return specification.to_dict(validate=False)


def _number(value: float | None, digits: int = 5) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def _driver_first(process: str) -> tuple[bool, str, int]:
    name, _, rank = process.rpartition(":")
    return (process != "driver", name, int(rank) if rank.isdigit() else 0)
