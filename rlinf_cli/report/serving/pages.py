"""The live pages: that of one run, which is the report's, and that of several side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from rlinf_cli.live import labels
from rlinf_cli.report import charts
from rlinf_cli.report.page import Drawings, Video, poster, rendered, report_context, result_curves
from rlinf_cli.report.series import Band
from rlinf_cli.report.serving.followed_run import FollowedRun
from rlinf_cli.report.sketch import sketch

_MOST_CURVES: Final = 3
# The name of a run, the number of its colour, and its values.
_RunLine: TypeAlias = tuple[str, int, Sequence[Band]]


class _Live(NamedTuple):
    """The part of a live page that a file lacks: its version, the address of all runs, and what is being read."""

    version: str
    overview: str
    reading: str


class LivePage(NamedTuple):
    """A page and the charts that it may ask for."""

    text: str
    specs: Drawings


def run_page(run: FollowedRun, *, overview: str, root: str, sketched: bool = False) -> LivePage:
    """Return the page of one run.

    Args:
        sketched: whether results are in the page itself, until their charts are drawn.
        overview: the address of the page of all runs; empty where there is one run.
        root: the address of the style and the scripts, as the page names it.
    """
    specs: Drawings = {}
    content = run.content()
    videos = [
        Video(f"{path.parent.name}/{path.name}", f"videos/{number}", _poster(path))
        for number, path in reversed(list(enumerate(content.videos)))
    ]
    live = _Live(str(run.version), overview, _reading([run]))
    context: dict[str, Any] = {**report_context(content, specs, videos), "specs": {}, "live": live, "root": root}
    if sketched:
        context["sketches"] = {
            name: sketch(enumerate(lines.values())) for name, _, lines in result_curves(content.series)
        }
    return LivePage(rendered("report.html.j2", context), specs)


def overview_page(runs: Sequence[FollowedRun], *, root: str, sketched: bool = False) -> LivePage:
    """Return the page of several runs side by side; see `run_page`."""
    specs: Drawings = {}
    curves = _curves(runs)
    for name, metric, lines in curves:
        specs[name] = partial(charts.compared, f"{metric} of each run over steps", lines)
    live = _Live(overview_version(runs), "", _reading(runs))
    context: dict[str, Any] = {
        "rows": [_row(number, run) for number, run in enumerate(runs)],
        "curves": [(name, metric) for name, metric, _ in curves],
        "sketches": {name: sketch(line[1:] for line in lines) for name, _, lines in curves} if sketched else {},
        "specs": {},
        "live": live,
        "root": root,
        "made": time.time(),
    }
    return LivePage(rendered("overview.html.j2", context), specs)


def overview_version(runs: Sequence[FollowedRun]) -> str:
    """Return the version of the page of several runs."""
    return ".".join(str(run.version) for run in runs)


def _row(number: int, run: FollowedRun) -> dict[str, Any]:
    series, state = run.series, run.folder.state
    newest = {name: column.last for name, column in series.columns.items()}
    headlines = labels.headlines(series.evaluations[-1][1], "eval") if series.evaluations else []
    headlines = headlines or labels.headlines(newest, "env", "rollout")
    return {
        "address": f"runs/{number}/",
        "name": run.name,
        "status": run.status,
        "step": state.step,
        "result": labels.figures_text(headlines),
        "slowest": _slowest(newest),
        "speed": "" if series.pace is None else labels.speed(series.pace),
    }


def _slowest(newest: dict[str, float]) -> str:
    """Return the phase that took longest in the last step, with its share."""
    step = newest.get("time/step", 0.0)
    phases = {name.removeprefix("time/"): value for name, value in newest.items() if name.startswith("time/")}
    phases = {name: value for name, value in phases.items() if "/" not in name and name != "step"}
    if not phases or step <= 0:
        return ""
    name = max(phases, key=lambda name: phases[name])
    return f"{labels.short_phase(name)} {phases[name] / step:.0%}"


def _curves(runs: Sequence[FollowedRun]) -> list[tuple[str, str, list[_RunLine]]]:
    """Return the identifier of each chart, its metric, and the line of each run that has it."""
    names = set[str]().union(*(run.series.columns for run in runs))
    wanted = [labels.headline_metric(names, space) for space in ("eval", "env", "rollout")]
    wanted += [name for name in ("train/actor/loss", "time/step") if name in names]
    metrics = list(dict.fromkeys(name for name in wanted if name is not None))[:_MOST_CURVES]
    return [(f"curve-{number}", metric, _of_runs(metric, runs)) for number, metric in enumerate(metrics)]


def _of_runs(metric: str, runs: Sequence[FollowedRun]) -> list[_RunLine]:
    return [
        (run.name, number, run.series.columns[metric].bands())
        for number, run in enumerate(runs)
        if metric in run.series.columns
    ]


def _reading(runs: Sequence[FollowedRun]) -> str:
    behind = [run for run in runs if run.reading]
    if not behind:
        return ""
    return "an overview of some steps: all of them are being read"


def _poster(path: Path) -> str:
    try:
        return _poster_of(path, path.stat().st_mtime_ns)
    except OSError:
        return ""


@lru_cache(maxsize=64)
def _poster_of(path: Path, changed: int) -> str:
    del changed
    return poster(path)
