"""The result of `rlinf compare`, as text and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf_cli.console import console
from rlinf_cli.live import labels
from rlinf_cli.live.run_summary import shown
from rlinf_cli.runs.metric_comparison import ConfigDifference, ResultGap, RunResult
from rlinf_cli.runs.run_comparison import Comparison
from rlinf_cli.runs.run_lookup import damaged_checkpoints

SCHEMA = "rlinf.compare/1"
# Differences in more packages than this are summarised.
_MOST_ROWS = 40
_ABSENT = "-"


def comparison_text(comparison: Comparison) -> str:
    """Return the differences, most important first, and the results."""
    parts = [_runs(comparison)]
    parts.append(first_difference(comparison))
    if comparison.differences:
        parts.append(_differences(comparison))
    parts.append("\n".join(verdict_lines(comparison)))
    return "\n\n".join(parts)


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


def _runs(comparison: Comparison) -> str:
    return console.table(result_heads(comparison), run_rows(comparison), right=(3,), keep=(0, 1))


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
        "differences": [_difference_record(difference) for difference in comparison.differences],
        "verdicts": [
            {
                "gap": verdict.gap,
                "low": verdict.low,
                "high": verdict.high,
                "larger_than_noise": verdict.larger_than_noise,
                "basis": verdict.basis,
            }
            for verdict in comparison.verdicts
        ],
    }


def _result_record(result: RunResult) -> dict[str, Any]:
    return {
        "step": result.step,
        "value": result.value,
        "low": result.low,
        "high": result.high,
        "count": result.count,
        "left_out": result.left_out,
    }


def _difference_record(difference: ConfigDifference) -> dict[str, Any]:
    return {"kind": str(difference.kind), "name": difference.name, "values": list(difference.values)}
