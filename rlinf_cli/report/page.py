"""Self-contained HTML pages: the report of one run, an overview of several, and a comparison."""

from __future__ import annotations

import base64
import io
import os
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import typer

from rlinf_cli import console
from rlinf_cli.command import Result
from rlinf_cli.console import shown, write_whole
from rlinf_cli.job.picture import Picture, picture_record
from rlinf_cli.live import labels
from rlinf_cli.live.labels import clock, duration, figure, short_phase
from rlinf_cli.report import charts
from rlinf_cli.report.charts import Curve, Spec, require_modules
from rlinf_cli.report.content import gather
from rlinf_cli.report.curves import NAME, TALL, compared_curves, draw_comparison, result_curves
from rlinf_cli.runs.metric_columns import MetricColumn, RunSeries, newest_of, series_of
from rlinf_cli.runs.run_comparison import (
    Comparison,
    compare_runs,
    compared,
    comparison_record,
    comparison_text,
    difference_rows,
    first_difference,
    result_heads,
    run_rows,
    verdict_lines,
)
from rlinf_cli.runs.run_lookup import find_run, find_runs, warn_of_damaged
from rlinf_cli.runs.x_axis import XAxis
from rlinf_core.errors import RunError
from rlinf_core.foreign.budget import Budget, OverBudgetError
from rlinf_core.runners.metrics import metrics_in
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus

# Keep a page, which is mostly the chart library's code, below 3 MB.
_MOST_METRICS: Final = 90
_MOST_CURVES: Final = 3
_SMALL_POINTS: Final = 120
_TIME_POINTS: Final = 100
_MOST_TEXT: Final = 3000
_MOST_VIDEOS: Final = 12
_VIDEO_BYTES: Final = 400_000
_ALL_VIDEO_BYTES: Final = 900_000
_POSTER_WIDTH: Final = 480
# The most bytes of a video frame that becomes a poster.
_LARGEST_FRAME: Final = 128 << 20
TIME: Final = "time/"
TEMPLATES: Final = Path(__file__).parent / "templates"
Specs: TypeAlias = dict[str, Spec]
# Time metrics that are not phases of a step.
BESIDE: Final = ("step", "evaluate", "save_checkpoint")


def report_page(folder: RunFolder, path: Path, *, refresh: int = 0) -> str:
    """Return the page of a run as one file.

    Args:
        path: the path of the page; large videos are linked relative to it.
        refresh: seconds after which a browser loads the page again; 0 for never.

    Raises:
        OSError: the metrics cannot be read.
    """
    report = gather(folder)
    specs: Specs = {}
    columns = report["series"].finite
    context = {
        "report": report,
        "curves": _curves(report["series"], specs),
        "times": _times(columns, specs),
        "staleness": _chosen(columns, specs, "staleness", ("staleness", "queue", "waiting", "in_flight")),
        "resources": _chosen(columns, specs, "resources", ("memory/", "speed/", "per_second")),
        "groups": _groups(columns, specs),
        "videos": _videos(folder.path, path),
    }
    return _page("report.html.j2", specs, context, refresh=refresh)


def placement_page(picture: Mapping[str, Any]) -> str:
    """Return the page that shows a record of `picture_record`."""
    page: str = _environment().get_template("placement_page.html.j2").render(picture=picture)
    return page


def _page(template: str, specs: Specs, context: Mapping[str, Any], *, refresh: int = 0) -> str:
    """Render a template of this package as a self-contained page, which includes the charts and their code."""
    script = charts.chart_script() if specs else ""
    page: str = _environment().get_template(template).render(**context, specs=specs, script=script, refresh=refresh)
    return page


@cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Escape everything, because model output and file names are untrusted.
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = environment.filters
    filters |= {"clock": clock, "duration": duration, "figure": figure, "moment": _moment, "short": _short}
    return environment


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _short(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ... ({len(text)} characters)"


def _curves(series: RunSeries, specs: Specs) -> list[tuple[str, str]]:
    """Add the curves of results; return the identifier and the title of each."""
    curves: list[tuple[str, str]] = []
    for number, (panel, lines) in enumerate(result_curves(series)):
        curves.append((f"curve-{number}", panel.title))
        specs[f"curve-{number}"] = charts.curves(f"{panel.title} over steps", lines, share=panel.share)
    return curves


def _times(columns: Mapping[str, MetricColumn], specs: Specs) -> dict[str, Any]:
    """Add charts of time: by phase over steps, and by component."""
    means = {name.removeprefix(TIME): column.mean() for name, column in columns.items() if name.startswith(TIME)}
    phases = {name: value for name, value in means.items() if "/" not in name and name not in BESIDE}
    step = means.get("step", sum(phases.values()))
    # With the same order, both charts give a phase the same color.
    names = sorted(phases, key=lambda name: -phases[name])
    rows = [(short_phase(name), phases[name]) for name in names]
    over = {short_phase(name): columns[f"{TIME}{name}"].bands(_TIME_POINTS) for name in names}
    if over:
        specs["time-steps"] = charts.stacked_over_steps("seconds of each step by phase", over)
    parts = [("driver", name, value) for name, value in rows]
    parts += [
        (component, work, value)
        for name, value in means.items()
        for component, slash, work in [name.partition("/")]
        if slash
    ]
    if parts:
        specs["time-components"] = charts.stacked_by_component("seconds of a step by component", parts)
    beside = [(short_phase(name), means[name]) for name in BESIDE[1:] if name in means]
    rest = step - sum(phases.values())
    rest = rest if rest > 0.01 * step else 0.0
    return {"phases": rows, "step": step, "rest": rest, "beside": beside}


def _chosen(
    columns: Mapping[str, MetricColumn], specs: Specs, space: str, words: Sequence[str]
) -> list[tuple[str, str]]:
    """Add small curves of the metrics whose names contain one of the words; return identifier and name of each.

    A metric that is always zero, such as the staleness of a synchronous run, is left out here.
    """
    names = [
        name
        for name, column in columns.items()
        if any(word in name for word in words) and not name.startswith("eval/") and any(column.values)
    ]
    return [_small(columns, specs, f"{space}-{number}", name) for number, name in enumerate(names)]


def _groups(columns: Mapping[str, MetricColumn], specs: Specs) -> dict[str, list[tuple[str, str]]]:
    """Add small curves of all metrics; return the identifiers and names of the curves by prefix."""
    names = [name for name in columns if not name.endswith(("_low", "_high"))][:_MOST_METRICS]
    groups: dict[str, list[tuple[str, str]]] = {}
    for number, name in enumerate(names):
        groups.setdefault(name.partition("/")[0], []).append(_small(columns, specs, f"metric-{number}", name))
    return groups


def _small(columns: Mapping[str, MetricColumn], specs: Specs, identifier: str, name: str) -> tuple[str, str]:
    line = Curve(name, columns[name].bands(_SMALL_POINTS))
    specs[identifier] = charts.curves(f"{name} over steps", [line], small=True)
    return identifier, name


def _videos(run: Path, page: Path) -> list[dict[str, str]]:
    """Return the newest videos of a run, newest first, each with a frame; embed small videos, link large ones."""
    videos: list[dict[str, str]] = []
    left = _ALL_VIDEO_BYTES
    paths = [path for path in run.rglob("*.mp4") if path.is_file() and not path.is_symlink()]
    for path in sorted(paths, key=lambda path: (path.stat().st_mtime, path.name), reverse=True)[:_MOST_VIDEOS]:
        size = path.stat().st_size
        if size <= min(left, _VIDEO_BYTES):
            left -= size
            source = f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"
        else:
            source = quote(os.path.relpath(path, page.parent))
        videos.append({"name": f"{path.parent.name}/{path.name}", "source": source, "poster": _poster(path)})
    return videos


def _poster(video: Path) -> str:
    """Return the middle frame of a video as a `data:` address; empty if the video cannot be read."""
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


def overview_page(folders: Sequence[RunFolder], path: Path, *, refresh: int = 0) -> str:
    """Return the page of several runs as one file, with links to existing reports of the runs.

    Args:
        path: the path of the page; links are relative to it.
        refresh: seconds after which a browser loads the page again; 0 for never.

    Raises:
        OSError: metrics cannot be read.
    """
    every = [series_of(metrics_in(folder.metrics_file)) for folder in folders]
    specs: Specs = {}
    metrics = _metrics(every)
    for number, metric in enumerate(metrics):
        # A run has the same color in all charts.
        lines = [
            Curve(folder.path.name, series.finite[metric].bands(), place=place)
            for place, (folder, series) in enumerate(zip(folders, every, strict=True))
            if metric in series.finite
        ]
        specs[f"curve-{number}"] = charts.curves(f"{metric} of each run over steps", lines, height=TALL)
    context = {
        "rows": [_run_row(folder, series, path) for folder, series in zip(folders, every, strict=True)],
        "curves": [(f"curve-{number}", metric) for number, metric in enumerate(metrics)],
        "made": time.time(),
    }
    return _page("overview.html.j2", specs, context, refresh=refresh)


def _run_row(folder: RunFolder, series: RunSeries, page: Path) -> dict[str, Any]:
    headlines = labels.headlines(series.evaluations[-1][1], "eval") if series.evaluations else []
    headlines = headlines or labels.headlines(newest_of(series.columns), "env", "rollout")
    report = folder.path / NAME
    return {
        "address": quote(os.path.relpath(report, page.parent)) if report.is_file() else "",
        "name": folder.path.name,
        "status": folder.state.outcome[0],
        "step": folder.state.step,
        "result": labels.figures_text(headlines),
        "slowest": _slowest(newest_of(series.finite)),
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


def _metrics(every: Sequence[RunSeries]) -> list[str]:
    """Return the metrics whose curves are drawn, results first."""
    names = set[str]().union(*(series.finite for series in every))
    wanted = [labels.headline_metric(names, space) for space in ("eval", "env", "rollout")]
    wanted += [name for name in ("train/actor/loss", "time/step") if name in names]
    return list(dict.fromkeys(name for name in wanted if name is not None))[:_MOST_CURVES]


def compared_page(comparison: Comparison) -> str:
    """Return the page of a comparison: results, overlaid curves, and differences, most important first."""
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
    return _page("compare.html.j2", {"curve": compared_curves(comparison, comparison.metric)}, context)


SCHEMA: Final = "rlinf.report/1"
# A long run's page takes seconds to make. Pauses limit the work to a tenth of one core.
_PAUSE_SECONDS: Final = 5.0
_PAUSES_PER_PAGE: Final = 9.0
_RELOAD_SECONDS: Final = 10
_PAGE: Final = (".html", ".htm")


def report_runs(runs: Sequence[str] | None, out: Path | None, *, watch: bool) -> Result | None:
    """Write the page of one run or several; with `watch`, write it repeatedly while a run is active."""
    require_modules("no report was written")
    _check_page(out)
    folders = [folder for name in runs for folder in find_runs(name)] if runs else [find_run(None)]
    path = (out or (folders[0].path / NAME if len(folders) == 1 else Path(NAME))).absolute()
    began = time.monotonic()
    active = _write(folders, path, watch=watch)
    paths = [str(folder.path) for folder in folders]
    shown_runs = {"run": paths[0]} if len(paths) == 1 else {"runs": paths}
    result = Result(shown(path), {"schema": SCHEMA, **shown_runs, "report": str(path)})
    if not (watch and active):
        return result
    result.show()
    console.message("written again every few seconds while the run lasts; Ctrl-C ends it")
    while active:
        time.sleep(max(_PAUSE_SECONDS, _PAUSES_PER_PAGE * (time.monotonic() - began)))
        began = time.monotonic()
        active = _write(folders, path, watch=True)
    return None


def compared_result(runs: Sequence[str], metrics: Sequence[str], out: Sequence[Path], x: XAxis) -> Result:
    """Return the comparison of runs, and write its page or picture.

    Args:
        runs: run folders, names of runs, or folders of sweeps.
        metrics: the metric to compare, and others that are only drawn.
        out: files to write: an HTML page, or a picture of the curves.
        x: the horizontal axis of the curves.
    """
    if any(file.suffix in _PAGE for file in out):
        require_modules("no page was written")
    folders = [folder for run in runs for folder in find_runs(run)]
    if len({folder.path.resolve() for folder in folders}) < len(folders) or len(folders) < 2:
        raise typer.BadParameter("name two or more different runs", param_hint="'RUN...'")
    if len(metrics) > 1 and all(file.suffix in _PAGE for file in out):
        raise typer.BadParameter("further metrics are only drawn: add `-o curves.png`", param_hint="'--metric'")
    warn_of_damaged(folders)
    comparison = compare_runs(folders, metrics[0] if metrics else None, x)
    for file in out:
        if file.suffix in _PAGE:
            write_whole(file, compared_page(comparison))
        else:
            draw_comparison(comparison, file, metrics)
    notes = tuple(f"wrote {file}" for file in out)
    return Result(lambda: comparison_text(comparison), lambda: comparison_record(comparison), notes=notes)


def draw_placement(result: Result, picture: Picture, out: Path) -> Result:
    """Write the page of a placement; return the result with a note, or the page itself if `out` is `-`."""
    require_modules("no picture was written", ("jinja2",))
    _check_page(out)
    page = placement_page(picture_record(picture))
    if str(out) == "-":
        return Result(page)
    write_whole(out, page)
    return result._replace(notes=(f"wrote {out}",))


def _check_page(out: Path | None) -> None:
    if out is not None and out.suffix.lower() not in ("", *_PAGE):
        raise typer.BadParameter("what is written is an HTML page: name a file that ends in `.html`", param_hint="'-o'")


def _write(folders: Sequence[RunFolder], path: Path, *, watch: bool) -> bool:
    """Write the page; return whether one of its runs is active.

    Args:
        watch: whether browsers reload the page while a run is active.
    """
    for folder in folders:
        folder.refresh()
    active = any(folder.state.outcome[0] == RunStatus.RUNNING for folder in folders)
    refresh = _RELOAD_SECONDS if watch and active else 0
    try:
        first, *others = folders
        page = overview_page(folders, path, refresh=refresh) if others else report_page(first, path, refresh=refresh)
    except OSError as error:
        where = str(error.filename or folders[0].path)
        raise RunError("the report cannot be created", where=where, why=error.strerror or str(error)) from error
    write_whole(path, page)
    return active
