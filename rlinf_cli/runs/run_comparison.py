"""The comparison of run folders for `rlinf compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_cli.live import labels
from rlinf_cli.runs.metric_columns import RunSeries, series_of
from rlinf_cli.runs.metric_comparison import (
    ConfigDifference,
    Kind,
    ResultGap,
    RunResult,
    differences,
    result_of,
    verdict,
)
from rlinf_cli.runs.provenance import read_provenance
from rlinf_cli.runs.x_axis import XAxis
from rlinf_core.errors import RunError
from rlinf_core.runners.metrics import Metrics
from rlinf_core.runners.opened_run import Run
from rlinf_core.runners.storage.run_folder import RunFolder


@dataclass(frozen=True)
class RunSet:
    """Runs that differ only in their seeds.

    Attributes:
        label: its letter in tables.
        runs: their folders.
        results: the results of each run.
        series: all metrics of each run.
    """

    label: str
    runs: tuple[RunFolder, ...]
    results: tuple[RunResult, ...]
    series: tuple[RunSeries, ...]


@dataclass(frozen=True)
class Comparison:
    """The comparison of sets of runs.

    Attributes:
        metric: the compared metric.
        sets: the sets of runs; the first is the baseline.
        differences: the differences between the sets; for a single set, between its runs.
        verdicts: the verdicts of each set but the first; for a single set, of each run but the first.
        x: what curves are laid over.
    """

    metric: str
    sets: tuple[RunSet, ...]
    differences: tuple[ConfigDifference, ...]
    verdicts: tuple[ResultGap, ...]
    x: XAxis = XAxis.STEP


def compare_runs(folders: Sequence[RunFolder], metric: str | None, x: XAxis = XAxis.STEP) -> Comparison:
    """Compare runs.

    Args:
        folders: two or more.
        metric: the metric to compare; None for the headline metric of evaluations, else of steps.
        x: what curves are laid over.

    Raises:
        RunError: a run has no configuration or no such metric, does not count `x`, or its metrics cannot be read.
    """
    runs = [Run(folder) for folder in folders]
    configs = [run.config for run in runs]
    provenances = [read_provenance(folder.path) for folder in folders]
    metrics = [run.steps for run in runs]
    series = [series_of(lines) for lines in metrics]
    for folder, one in zip(folders, series, strict=True):
        if x.metric and x.metric not in one.columns:
            why = f"its metrics have no `{x.metric}`"
            raise RunError(f"a run does not count {x.words}", where=str(folder.metrics_file), why=why)
    metric = metric or _judged_by(metrics)
    results = [_result(folder, metric, lines) for folder, lines in zip(folders, metrics, strict=True)]
    alike: list[list[int]] = []
    for number in range(len(folders)):
        for chosen in alike:
            first = chosen[0]
            pair_differences = differences([configs[first], configs[number]], [provenances[first], provenances[number]])
            # The machine of a run affects its speed, not its result.
            if all(difference.kind in (Kind.SEEDS, Kind.MACHINE) for difference in pair_differences):
                chosen.append(number)
                break
        else:
            alike.append([number])
    sets = tuple(
        RunSet(
            chr(ord("A") + place) if place < 26 else str(place),
            tuple(folders[number] for number in chosen),
            tuple(results[number] for number in chosen),
            tuple(series[number] for number in chosen),
        )
        for place, chosen in enumerate(alike)
    )
    compared = [chosen[0] for chosen in alike] if len(alike) > 1 else list(range(len(folders)))
    between = differences([configs[number] for number in compared], [provenances[number] for number in compared])
    if len(alike) > 1:
        verdicts = tuple(verdict(sets[0].results, run_set.results) for run_set in sets[1:])
    else:
        # A single set: each run is compared with the first, by single-run intervals.
        verdicts = tuple(verdict([results[0]], [result]) for result in results[1:])
    return Comparison(metric, sets, tuple(between), verdicts, x)


def _judged_by(metrics: Sequence[Sequence[Metrics]]) -> str:
    """Return the first headline metric that all runs have."""
    names = [{name for line in lines for name in line.metrics} for lines in metrics]
    shared = names[0].intersection(*names[1:])
    for space in ("eval", "env", "rollout"):
        metric = labels.headline_metric(shared, space)
        if metric is not None:
            return metric
    raise RunError("the runs have no headline metric in common", help="choose a metric with `--metric`")


def _result(folder: RunFolder, metric: str, lines: Sequence[Metrics]) -> RunResult:
    result = result_of(metric, [(line.step, line.metrics) for line in lines])
    if result.value != result.value:
        raise RunError(
            f"the run has no metric `{metric}`",
            where=str(folder.metrics_file),
            help="use `--metric` with one that all runs have",
        )
    return result
