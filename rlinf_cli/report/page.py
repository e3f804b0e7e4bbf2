"""HTML pages: sections with charts in one self-contained file."""

from __future__ import annotations

import base64
import io
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from rlinf_cli.report import charts
from rlinf_cli.report.charts import Spec
from rlinf_cli.report.curves import result_curves
from rlinf_cli.report.gathering import RunContent
from rlinf_cli.report.series import Band, RunSeries, banded
from rlinf_cli.runs.comparison_table import compared, difference_rows, first_difference, run_rows, verdict_lines
from rlinf_cli.runs.run_comparison import Comparison
from rlinf_core.foreign.budget import Budget, OverBudgetError
from rlinf_core.runners.storage.first_contact import ContactCheck

# Keeps a page, most of which is the chart library's code, below 3 MB.
_MOST_METRICS: Final = 90
_SMALL_POINTS: Final = 120
_TIME_POINTS: Final = 100
_VIDEO_BYTES: Final = 400_000
_ALL_VIDEO_BYTES: Final = 900_000
_POSTER_WIDTH: Final = 480
# Bytes of one frame of a video, of which a poster is made.
_LARGEST_FRAME: Final = 128 << 20
_TIME: Final = "time/"
TEMPLATES: Final = Path(__file__).parent / "templates"
# Makes the specification of a chart.
Drawing: TypeAlias = Callable[[], Spec]
Drawings: TypeAlias = dict[str, Drawing]
_IDLE: Final = {"speed/learner_idle": "actor for samples", "speed/env_idle": "env for a rollout to begin"}
# Phases outside the steps, not part of their time.
_BESIDE: Final = ("step", "evaluate", "save_checkpoint")


class Video(NamedTuple):
    """A video of the page.

    Attributes:
        name: the name, as it is shown.
        source: its content as a `data:` address, or the address of the file.
        poster: one of its frames as a `data:` address, shown until it is played; empty where it cannot be read.
    """

    name: str
    source: str
    poster: str


class MetricGroup(NamedTuple):
    """Small curves of the metrics that share a prefix."""

    name: str
    metrics: Sequence[tuple[str, str]]


class Table(NamedTuple):
    """A table of text; `right` are the columns that are aligned to the right."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int]


def report_page(report: RunContent, path: Path, *, refresh: int = 0) -> str:
    """Return the page of a run as one file.

    Args:
        path: where the page is written; large videos are linked relative to it.
        refresh: seconds after which a browser loads the page again; 0 for never.
    """
    specs: Drawings = {}
    context = {
        "report": report,
        "asked": [setting for setting in report.settings if setting.origin in ("file", "override")],
        "comparisons": _comparisons(report.comparisons),
        "curves": _curves(report.series, specs),
        "times": _times(report.series, specs),
        "timelines": _timelines(report, specs),
        "staleness": _chosen(report.series, specs, "staleness", ("staleness", "queue", "waiting", "in_flight")),
        "resources": _chosen(report.series, specs, "resources", ("memory/", "speed/", "per_second")),
        "groups": _groups(report.series, specs),
        "videos": _videos(report.videos, path),
    }
    return write_page("report.html.j2", specs, context, refresh=refresh)


def placement_page(picture: Mapping[str, Any]) -> str:
    """Return the picture of a placement as a page: the record of `picture_record`."""
    page: str = _environment().get_template("placement_page.html.j2").render(picture=picture)
    return page


def write_page(template: str, specs: Mapping[str, Drawing], context: Mapping[str, Any], *, refresh: int = 0) -> str:
    """Return a template of this package as a page that loads nothing: charts and their code are in it."""
    from rlinf_cli.report.script import chart_script

    drawn = {name: draw() for name, draw in specs.items()}
    script = chart_script() if drawn else ""
    page: str = _environment().get_template(template).render(**context, specs=drawn, script=script, refresh=refresh)
    return page


@cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from rlinf_cli.live.labels import clock, duration, figure

    # Everything is escaped: model output and file names are untrusted text.
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = environment.filters
    filters |= {"clock": clock, "duration": duration, "figure": figure, "moment": _moment}
    return environment


def _moment(seconds: float) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _comparisons(checks: Sequence[ContactCheck]) -> Table | None:
    """Return what was compared before the first step, without columns that are empty in every row."""
    from rlinf_cli.live.labels import duration

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.2g}"

    columns = {
        "by": [check.component for check in checks],
        "what": [check.what for check in checks],
        "with": [check.with_ for check in checks],
        "verdict": [check.verdict for check in checks],
        "difference": [number(check.largest_difference) for check in checks],
        "bound": [number(check.bound) for check in checks],
        "time": ["" if check.seconds is None else duration(check.seconds) for check in checks],
        "note": [check.note for check in checks],
    }
    heads = [head for head, column in columns.items() if any(column)]
    right = [place for place, head in enumerate(heads) if head in ("difference", "bound", "time")]
    return Table(heads, list(zip(*(columns[head] for head in heads), strict=True)), right) if heads else None


def _curves(series: RunSeries, specs: Drawings) -> list[tuple[str, str]]:
    """Add the curves of results; return the identifier and the title of each."""
    curves: list[tuple[str, str]] = []
    for number, (panel, lines) in enumerate(result_curves(series)):
        curves.append((f"curve-{number}", panel.title))
        specs[f"curve-{number}"] = partial(charts.curve, f"{panel.title} over steps", lines, share=panel.share)
    return curves


def _times(series: RunSeries, specs: Drawings) -> dict[str, Any]:
    """Add charts of time: by phase over steps, and by component."""
    from rlinf_cli.live.labels import short_phase

    means: dict[str, float] = {}
    for name, column in series.columns.items():
        if name.startswith(_TIME):
            means[name.removeprefix(_TIME)] = column.mean()
    phases = {name: value for name, value in means.items() if "/" not in name and name not in _BESIDE}
    step = means.get("step", sum(phases.values()))
    # In one order, the two charts give a phase the same colour.
    names = sorted(phases, key=lambda name: -phases[name])
    rows = [(short_phase(name), phases[name]) for name in names]
    rest = step - sum(phases.values())
    over: dict[str, Sequence[Band]] = {
        short_phase(name): series.columns[f"{_TIME}{name}"].bands(_TIME_POINTS) for name in names
    }
    if over:
        specs["time-steps"] = partial(charts.stacked_over_steps, "seconds of each step by phase", over)
    parts = [("driver", name, value) for name, value in rows]
    for name, value in means.items():
        component, slash, activity = name.partition("/")
        if slash:
            parts.append((component, activity, value))
    if parts:
        specs["time-components"] = partial(charts.stacked_by_component, "seconds of a step by component", parts)
    beside = [(short_phase(name), means[name]) for name in _BESIDE[1:] if name in means]
    rest = rest if rest > 0.01 * step else 0.0
    return {"phases": rows, "step": step, "rest": rest, "beside": beside, "waits": _waits(series)}


def _waits(series: RunSeries) -> list[tuple[str, float]]:
    """Return who waits, and which share of the newest steps, the longest first."""
    shares: dict[str, float] = {}
    step = _recent_mean(series, f"{_TIME}step")
    for name in series.columns:
        component = name.removeprefix(_TIME).removesuffix("/wait")
        if step and name == f"{_TIME}{component}/wait":
            shares[f"{component} for others"] = _recent_mean(series, name) / step
    for name, label in _IDLE.items():
        if name in series.columns:
            shares[label] = _recent_mean(series, name)
    return sorted(shares.items(), key=lambda row: -row[1])


def _recent_mean(series: RunSeries, name: str) -> float:
    values = series.columns[name].newest if name in series.columns else ()
    return math.fsum(values) / len(values) if values else 0.0


def _timelines(report: RunContent, specs: Drawings) -> list[tuple[str, Any]]:
    figures: list[tuple[str, Any]] = []
    for place, timeline in enumerate(report.timelines):
        name = f"timeline-{place}"
        title = f"timeline of step {timeline.step}"
        specs[name] = partial(charts.timeline, title, timeline.bars, timeline.seconds)
        figures.append((name, timeline))
    return figures


def _chosen(series: RunSeries, specs: Drawings, space: str, words: Sequence[str]) -> list[tuple[str, str]]:
    """Add small curves of the metrics whose names contain one of the words; return identifier and name of each.

    One that is always zero, such as the staleness of a synchronous run, is among all metrics only.
    """
    names = [
        name
        for name, column in series.columns.items()
        if any(word in name for word in words) and not name.startswith("eval/") and not column.is_zero
    ]
    return [_small(series, specs, f"{space}-{number}", name) for number, name in enumerate(names)]


def _small(series: RunSeries, specs: Drawings, identifier: str, name: str) -> tuple[str, str]:
    column = series.columns[name]
    specs[identifier] = lambda: charts.small_curve(f"{name} over steps", column.bands(_SMALL_POINTS))
    return identifier, name


def _groups(series: RunSeries, specs: Drawings) -> list[MetricGroup]:
    names = [name for name in series.columns if not name.endswith(("_low", "_high"))][:_MOST_METRICS]
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(name.partition("/")[0], []).append(name)
    number = iter(range(len(names)))
    return [
        MetricGroup(group, [_small(series, specs, f"metric-{next(number)}", name) for name in columns])
        for group, columns in grouped.items()
    ]


def _videos(paths: Sequence[Path], page: Path) -> list[Video]:
    """Return videos, newest first: small ones embedded, others as links."""
    from urllib.parse import quote

    videos: list[Video] = []
    left = _ALL_VIDEO_BYTES
    for path in reversed(paths):
        size = path.stat().st_size
        if size <= min(left, _VIDEO_BYTES):
            left -= size
            source = f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"
        else:
            source = quote(os.path.relpath(path, page.parent))
        videos.append(Video(f"{path.parent.name}/{path.name}", source, _poster(path)))
    return videos


def _poster(video: Path) -> str:
    """Return the frame in the middle of a video as an address."""
    try:
        av: Any = import_module("av")
    except ImportError:
        return ""
    picture = io.BytesIO()
    try:
        with av.open(str(video)) as file:
            context = file.streams.video[0].codec_context
            Budget(_LARGEST_FRAME, "a picture").take_array((context.width, context.height), 4)
            if file.duration:
                file.seek(file.duration // 2)
            image: Any = next(file.decode(video=0)).to_image()
    except (av.FFmpegError, OSError, IndexError, StopIteration, OverBudgetError):
        return ""
    image.thumbnail((_POSTER_WIDTH, _POSTER_WIDTH))
    image.save(picture, "JPEG", quality=70)
    return f"data:image/jpeg;base64,{base64.b64encode(picture.getvalue()).decode()}"


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
    curve = partial(charts.compared, f"{comparison.metric} of each run over steps", runs)
    return write_page("compare.html.j2", {"curve": curve}, context)
