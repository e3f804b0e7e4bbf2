"""Single steps out of a trace."""

from __future__ import annotations

from pathlib import Path

from rlinf_cli.report.trace_steps import TraceBar, bars_of_steps
from rlinf_core.process import tracing
from rlinf_core.process.tracing import Taken, TraceSpan
from rlinf_core.runners.trace import TraceWriter

NOW = 1_773_482_000.0


def test_steps_have_the_bars_that_reach_into_them(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.json") as trace:
        spans = [
            TraceSpan("method", "generate", NOW + 9, 2.0, 1),
            TraceSpan(tracing.WAIT, "recv", NOW + 11, 0.5, 1),
            TraceSpan(tracing.TRANSFER, "send to actor:0", NOW + 12, 0.25, 1),
            TraceSpan("method", "elsewhere", NOW + 30, 1.0, 1),
        ]
        trace.add("rollout:0", Taken(spans, 0))
    result = bars_of_steps(tmp_path / "trace.json", {4: (NOW + 10, NOW + 20), 5: (NOW + 50, NOW + 60)})
    bars, left_out = result[4]
    assert left_out == 0
    assert [(bar.process, bar.kind, bar.name, round(bar.start, 3), round(bar.seconds, 3)) for bar in bars] == [
        ("rollout:0", "method", "generate", -1.0, 2.0),
        ("rollout:0", "wait", "recv", 1.0, 0.5),
        ("rollout:0", "transfer", "send to actor:0", 2.0, 0.25),
    ]
    assert result[5] == ([], 0)


def test_only_the_longest_bars_stay_and_a_torn_end_is_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as trace:
        trace.add(
            "a:0", Taken([TraceSpan("timer", str(number), NOW + number, number / 10, 1) for number in range(1, 10)], 0)
        )
    path.write_text(path.read_text()[:-40] + '{"name": "x", "ts": 17')
    bars, left_out = bars_of_steps(path, {1: (NOW, NOW + 20)}, most=2)[1]
    assert left_out == 7
    assert [bar.name for bar in bars] == ["8", "9"]
    assert isinstance(bars[0], TraceBar)
