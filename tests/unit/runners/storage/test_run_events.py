"""The story of a run."""

from __future__ import annotations

from pathlib import Path

from rlinf_core.runners.storage import run_events


def test_events_come_back_in_order_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    assert run_events.story_with_faults(tmp_path) == ([], [])
    run_events.append_event(tmp_path, run_events.STARTED, 0, "started: actor 1")
    run_events.append_event(tmp_path, run_events.FAILED, 7, "`env:0` died", ["why: killed", "do: look"])
    with (tmp_path / run_events.FILE).open("a") as file:
        file.write('{"time": 1, "kind"')
    (started, failed), _ = run_events.story_with_faults(tmp_path)
    assert (started.kind, started.step, started.text, started.details) == ("started", 0, "started: actor 1", ())
    assert failed.details == ("why: killed", "do: look")
    assert started.time <= failed.time
