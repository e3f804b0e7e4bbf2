"""The comparison of run folders for `rlinf compare`, as text and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rlinf_cli.console import console
from rlinf_cli.live import labels
from rlinf_cli.live.run_summary import shown
from rlinf_cli.runs.documents import read_provenance
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
from rlinf_cli.runs.run_lookup import damaged_checkpoints
from rlinf_cli.runs.x_axis import XAxis
from rlinf_core.errors import RunError
from rlinf_core.runners.metrics import Metrics
from rlinf_core.runners.opened_run import Run
from rlinf_core.runners.storage.run_folder import RunFolder


class RunSet(NamedTuple):
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


class Comparison(NamedTuple):
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
    for folder, lines, one in zip(folders, metrics, series, strict=True):
        if not lines:
            raise RunError(
                "a run has no metrics to compare",
                where=str(folder.path),
                why=f"it is {folder.state.status}, and has finished no step",
                help=f"`rlinf why {folder.path.name}` says what happened; leave it out",
            )
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


SCHEMA = "rlinf.compare/1"
# Differences in more packages than this are summarised.
_MOST_ROWS = 40
_ABSENT = "-"


def comparison_text(comparison: Comparison) -> str:
    """Return the differences, most important first, and the results."""
    table = console.table(result_heads(comparison), run_rows(comparison), right=(3,), keep=(0, 1))
    differences = [_differences(comparison)] if comparison.differences else []
    return "\n\n".join([table, first_difference(comparison), *differences, "\n".join(verdict_lines(comparison))])


def first_difference(comparison: Comparison) -> str:
    """Return the most important difference, in one line."""
    if not comparison.differences:
        return "no recorded difference between the runs"
    first = comparison.differences[0]
    return f"first difference: {first.name} ({first.kind}), {' | '.join(map(_shown, first.values))}"


def run_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return set, run, status, step (or its place on another axis) and result of each run."""
    return [
        (run_set.label, shown(run.path), run.state.status, f"{place.get(result.step, 0):.0f}", result_text(result))
        for run_set in comparison.sets
        for run, result, place in zip(run_set.runs, run_set.results, map(comparison.x.of, run_set.series), strict=True)
    ]


def result_heads(comparison: Comparison) -> tuple[str, ...]:
    """Return the heads of `run_rows`."""
    return "set", "run", "status", comparison.x.label, comparison.metric


def _differences(comparison: Comparison) -> str:
    rows = difference_rows(comparison.differences[:_MOST_ROWS])
    text = console.table(("kind", "what", *compared(comparison)), rows, keep=(0,))
    rest = len(comparison.differences) - _MOST_ROWS
    return f"{text}\nand {rest} more" if rest > 0 else text


def difference_rows(differences: Sequence[ConfigDifference]) -> list[tuple[str, ...]]:
    """Return the kind, the name, and the value in each run, of each difference."""
    return [(difference.kind, difference.name, *map(_shown, difference.values)) for difference in differences]


def compared(comparison: Comparison) -> list[str]:
    """Return the names of the compared items: the sets, or the runs of a single set."""
    first, *others = comparison.sets
    return (
        [run_set.label for run_set in comparison.sets]
        if others
        else [f"{first.label}{at + 1}" for at in range(len(first.runs))]
    )


def verdict_lines(comparison: Comparison) -> list[str]:
    """Return a line for each set but the first: its gap to the first, and whether that is noise."""
    first, *names = compared(comparison)
    return [f"{name} - {first}: {_verdict(gap)}" for name, gap in zip(names, comparison.verdicts, strict=True)]


def _verdict(result_gap: ResultGap) -> str:
    gap = f"{result_gap.gap:+.3g}"
    if result_gap.low is None or result_gap.high is None:
        return f"{gap}; {result_gap.basis}"
    word = "larger than noise" if result_gap.larger_than_noise else "within noise"
    return f"{gap} [{result_gap.low:+.3g}, {result_gap.high:+.3g}], {word}, by {result_gap.basis}"


def result_text(result: RunResult) -> str:
    """Return a result with its interval, how many it is of, and how many were left out."""
    text = labels.figure(result.value)
    if result.low is not None and result.high is not None:
        text += f" [{result.low:.2f}, {result.high:.2f}]"
    if result.count and result.metric.startswith("eval/"):
        text += f" of {result.count}"
    return f"{text}, {result.left_out} left out" if result.left_out else text


def _shown(value: str | None) -> str:
    return _ABSENT if value is None else value or "(none)"


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as data."""
    return {
        "schema": SCHEMA,
        "metric": comparison.metric,
        "sets": [
            {
                "label": run_set.label,
                "runs": [
                    {
                        "folder": str(run.path),
                        "status": run.state.status,
                        "damaged_checkpoints": damaged_checkpoints(run),
                        **_result_record(result),
                    }
                    for run, result in zip(run_set.runs, run_set.results, strict=True)
                ],
            }
            for run_set in comparison.sets
        ],
        "differences": [difference._asdict() for difference in comparison.differences],
        "verdicts": [
            {name: getattr(gap, name) for name in ("gap", "low", "high", "larger_than_noise", "basis")}
            for gap in comparison.verdicts
        ],
    }


def _result_record(result: RunResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in ("step", "value", "low", "high", "count", "left_out")}
