"""The result of `rlinf compare`, as text and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf_cli.console import console
from rlinf_cli.live import labels
from rlinf_cli.live.run_summary import shown
from rlinf_cli.runs.metric_comparison import Difference, ResultGap, RunResult
from rlinf_cli.runs.run_comparison import Comparison

SCHEMA = "rlinf.compare/1"
# Differences in more packages than this are summarised.
_MOST_ROWS = 40
_ABSENT = "-"


def comparison_text(found: Comparison) -> str:
    """Return the differences, most important first, and the results."""
    parts = [_runs(found)]
    parts.append(first_difference(found))
    if found.differences:
        parts.append(_differences(found))
    parts.append("\n".join(verdict_lines(found)))
    return "\n\n".join(parts)


def first_difference(found: Comparison) -> str:
    """Return the most important difference, in one line."""
    if not found.differences:
        return "no recorded difference between the runs"
    first = found.differences[0]
    return f"first difference: {first.name} ({first.kind}), {' | '.join(map(_shown, first.values))}"


def run_rows(found: Comparison) -> list[tuple[str, ...]]:
    """Return set, run, status, step and result of each run."""
    return [
        (run_set.label, shown(run.path), run.state.status, str(result.step), _result(result))
        for run_set in found.sets
        for run, result in zip(run_set.runs, run_set.results, strict=True)
    ]


def _runs(found: Comparison) -> str:
    rows = run_rows(found)
    return console.table(("set", "run", "status", "step", found.metric), rows, right=(3,), keep=(0, 1))


def _differences(found: Comparison) -> str:
    rows = difference_rows(found.differences[:_MOST_ROWS])
    text = console.table(("kind", "what", *compared(found)), rows, keep=(0,))
    rest = len(found.differences) - _MOST_ROWS
    return f"{text}\nand {rest} more" if rest > 0 else text


def difference_rows(found: Sequence[Difference]) -> list[tuple[str, ...]]:
    """Return the kind, the name, and the value in each run, of each difference."""
    return [(difference.kind, difference.name, *map(_shown, difference.values)) for difference in found]


def compared(found: Comparison) -> list[str]:
    """Return the names of the compared items: the sets, or the runs of a single set."""
    first, *others = found.sets
    return (
        [run_set.label for run_set in found.sets]
        if others
        else [f"{first.label}{at + 1}" for at in range(len(first.runs))]
    )


def verdict_lines(found: Comparison) -> list[str]:
    """Return a line for each set but the first: its gap to the first, and whether that is noise."""
    first, *names = compared(found)
    return [f"{name} - {first}: {_verdict(gap)}" for name, gap in zip(names, found.verdicts, strict=True)]


def _verdict(found: ResultGap) -> str:
    gap = f"{found.gap:+.3g}"
    if found.low is None or found.high is None:
        return f"{gap}; {found.basis}"
    word = "larger than noise" if found.larger_than_noise else "within noise"
    return f"{gap} [{found.low:+.3g}, {found.high:+.3g}], {word}, by {found.basis}"


def _result(found: RunResult) -> str:
    text = labels.figure(found.value)
    if found.low is not None and found.high is not None:
        text += f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{text} of {found.count}" if found.count and found.metric.startswith("eval/") else text


def _shown(value: str | None) -> str:
    return _ABSENT if value is None else value or "(none)"


def comparison_record(found: Comparison) -> dict[str, Any]:
    """Return the comparison as data."""
    return {
        "schema": SCHEMA,
        "metric": found.metric,
        "sets": [
            {
                "label": run_set.label,
                "runs": [
                    {"folder": str(run.path), "status": run.state.status, **_result_record(result)}
                    for run, result in zip(run_set.runs, run_set.results, strict=True)
                ],
            }
            for run_set in found.sets
        ],
        "differences": [_difference_record(difference) for difference in found.differences],
        "verdicts": [
            {
                "gap": verdict.gap,
                "low": verdict.low,
                "high": verdict.high,
                "larger_than_noise": verdict.larger_than_noise,
                "basis": verdict.basis,
            }
            for verdict in found.verdicts
        ],
    }


def _result_record(found: RunResult) -> dict[str, Any]:
    return {"step": found.step, "value": found.value, "low": found.low, "high": found.high, "count": found.count}


def _difference_record(difference: Difference) -> dict[str, Any]:
    return {"kind": str(difference.kind), "name": difference.name, "values": list(difference.values)}
