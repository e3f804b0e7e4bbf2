"""The comparison of run folders for `rlinf compare`, as text and as data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlinf_cli import console
from rlinf_cli.console import shown
from rlinf_cli.live import labels
from rlinf_cli.runs.documents import Provenance, read_provenance
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
from rlinf_core.runners.metrics import metrics_in
from rlinf_core.runners.opened_run import Run, config_in
from rlinf_core.runners.storage.run_folder import RunFolder


class ComparedRun(NamedTuple):
    """A run with the data for its comparison; `earlier` are the configurations before it was resumed."""

    folder: RunFolder
    config: Mapping[str, Any]
    earlier: Sequence[Mapping[str, Any]]
    provenance: Provenance | None
    series: RunSeries
    result: RunResult


class RunSet(NamedTuple):
    """Runs that differ only in their seeds; `label` is the letter of the set in tables."""

    label: str
    runs: Sequence[ComparedRun]

    @property
    def results(self) -> list[RunResult]:
        """The results of the runs."""
        return [run.result for run in self.runs]


class Comparison(NamedTuple):
    """The comparison of sets of runs.

    Attributes:
        metric: the compared metric.
        sets: the sets of runs; the first is the baseline.
        differences: the differences between the sets; for a single set, between its runs.
        verdicts: the verdict on each set but the first; for a single set, on each run but the first.
        x: the horizontal axis of curves.
    """

    metric: str
    sets: Sequence[RunSet]
    differences: Sequence[ConfigDifference]
    verdicts: Sequence[ResultGap]
    x: XAxis = XAxis.STEP


def compare_runs(folders: Sequence[RunFolder], metric: str | None, x: XAxis = XAxis.STEP) -> Comparison:
    """Compare runs.

    Args:
        folders: two or more run folders.
        metric: the metric to compare; None for the headline metric of evaluations, else of steps.
        x: the horizontal axis of curves.

    Raises:
        RunError: a run has no configuration, lacks the metric, does not count `x`, or its metrics cannot be read.
    """
    every = list(map(_series, folders))
    for folder, series in zip(folders, every, strict=True):
        if not len(series.steps):
            raise RunError(
                "a run has no metrics to compare",
                where=str(folder.path),
                why=f"it is {folder.state.outcome[0]}, and has finished no step",
                help=f"`rlinf why {shlex.quote(folder.path.name)}` says what happened; leave it out",
            )
        if x.metric and x.metric not in series.columns:
            why = f"its metrics have no `{x.metric}`"
            raise RunError(f"a run does not count {x.words}", where=str(folder.metrics_file), why=why)
    metric = metric or _judged_by(every)
    runs = [
        ComparedRun(
            folder,
            Run(folder).config,
            [*map(config_in, folder.earlier_config_files)],
            read_provenance(folder.path),
            series,
            _result(folder, metric, series),
        )
        for folder, series in zip(folders, every, strict=True)
    ]
    alike: list[list[ComparedRun]] = []
    for run in runs:
        group = next((group for group in alike if _differ_in_seeds(group[0], run)), None)
        if group is None:
            alike.append([run])
        else:
            group.append(run)
    sets = tuple(RunSet(chr(ord("A") + at) if at < 26 else str(at), group) for at, group in enumerate(alike))
    if len(sets) > 1:
        between = _between([group[0] for group in alike])
        verdicts = [verdict(sets[0].results, run_set.results) for run_set in sets[1:]]
    else:
        # With a single set, each run is compared with the first run by single-run intervals.
        between = _between(runs)
        verdicts = [verdict([runs[0].result], [run.result]) for run in runs[1:]]
    return Comparison(metric, sets, between, verdicts, x)


def _series(folder: RunFolder) -> RunSeries:
    """Return a run's metrics, without a list of all lines: a long run has a million."""
    try:
        return series_of(metrics_in(folder.metrics_file))
    except OSError as error:
        where, why = str(folder.metrics_file), error.strerror
        raise RunError("the metrics of a run cannot be read", where=where, why=why) from None


def _between(runs: Sequence[ComparedRun]) -> list[ConfigDifference]:
    return differences([run.config for run in runs], [run.provenance for run in runs], [run.earlier for run in runs])


def _differ_in_seeds(first: ComparedRun, second: ComparedRun) -> bool:
    # The machine of a run affects its speed, not its result.
    return all(difference.kind in (Kind.SEEDS, Kind.MACHINE) for difference in _between([first, second]))


def _judged_by(every: Sequence[RunSeries]) -> str:
    """Return the first headline metric that all runs have."""
    shared = set(every[0].columns).intersection(*(series.columns for series in every[1:]))
    for space in ("eval", "env", "rollout"):
        metric = labels.headline_metric(shared, space)
        if metric is not None:
            return metric
    raise RunError("the runs have no headline metric in common", help="choose a metric with `--metric`")


def _result(folder: RunFolder, metric: str, series: RunSeries) -> RunResult:
    result = result_of(metric, series)
    if result.value != result.value:
        raise RunError(
            f"the run has no {'finite value of the ' if metric in series.columns else ''}metric `{metric}`",
            where=str(folder.metrics_file),
            help="use `--metric` with one that all runs have",
        )
    return result


SCHEMA = "rlinf.compare/1"
# More differences than this are summarized.
_MOST_ROWS = 40
_ABSENT = "-"
# The fields of a result and of a verdict in `--json`.
_RESULT = ("step", "value", "low", "high", "count", "left_out")
_VERDICT = ("gap", "low", "high", "larger_than_noise", "basis")


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
    """Return set, run, status, step (or its position on another axis) and result of each run."""
    rows: list[tuple[str, ...]] = []
    for run_set in comparison.sets:
        for run in run_set.runs:
            place = comparison.x.of(run.series).get(run.result.step, 0)
            folder = run.folder
            cells = (shown(folder.path), folder.state.outcome[0], f"{place:.0f}", result_text(run.result))
            rows.append((run_set.label, *cells))
    return rows


def result_heads(comparison: Comparison) -> tuple[str, ...]:
    """Return the heads of `run_rows`."""
    return "set", "run", "status", comparison.x.label, comparison.metric


def _differences(comparison: Comparison) -> str:
    rows = difference_rows(comparison.differences[:_MOST_ROWS])
    text = console.table(("kind", "what", *compared(comparison)), rows, keep=(0,))
    rest = len(comparison.differences) - _MOST_ROWS
    return f"{text}\nand {rest} more" if rest > 0 else text


def difference_rows(differences: Sequence[ConfigDifference]) -> list[tuple[str, ...]]:
    """Return the kind, the name, and the values in all runs for each difference."""
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
    """Return a line for each set but the first: its gap to the first set, and whether the gap may be noise."""
    first, *names = compared(comparison)
    return [f"{name} - {first}: {_verdict(gap)}" for name, gap in zip(names, comparison.verdicts, strict=True)]


def _verdict(result_gap: ResultGap) -> str:
    gap = f"{result_gap.gap:+.3g}"
    if result_gap.low is None or result_gap.high is None:
        return f"{gap}; {result_gap.basis}"
    word = "larger than noise" if result_gap.larger_than_noise else "within noise"
    return f"{gap} [{result_gap.low:+.3g}, {result_gap.high:+.3g}], {word}, by {result_gap.basis}"


def result_text(result: RunResult) -> str:
    """Return a result with its interval, the number of averaged episodes, and the number left out."""
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
                        "folder": str(run.folder.path),
                        "status": run.folder.state.outcome[0],
                        "damaged_checkpoints": damaged_checkpoints(run.folder),
                        **{name: getattr(run.result, name) for name in _RESULT},
                    }
                    for run in run_set.runs
                ],
            }
            for run_set in comparison.sets
        ],
        "differences": [difference._asdict() for difference in comparison.differences],
        "verdicts": [{name: getattr(gap, name) for name in _VERDICT} for gap in comparison.verdicts],
    }
