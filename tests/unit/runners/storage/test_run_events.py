"""The events of a run: read as far as they are whole, whatever a received file holds."""

from __future__ import annotations

import os
from pathlib import Path

from rlinf_core.runners.storage import run_events


def test_events_come_back_in_order_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    assert run_events.story_with_faults(tmp_path) == ([], [])
    run_events.append_event(tmp_path, run_events.STARTED, 0, "started: actor 1")
    run_events.append_event(tmp_path, run_events.FAILED, 7, "`env:0` died", ["why: killed", "do: look"])
    with (tmp_path / run_events.FILE).open("a") as file:
        file.write('{"time": 1, "kind"')
    (started, failed), faults = run_events.story_with_faults(tmp_path)
    assert (started.kind, started.step, started.text, started.details) == ("started", 0, "started: actor 1", ())
    assert failed.details == ("why: killed", "do: look")
    assert started.time <= failed.time
    assert faults == []


def test_text_with_other_line_separators_is_one_event(tmp_path: Path) -> None:
    text = "ValueError: one\u2028two\x85three\x0bfour"
    run_events.append_event(tmp_path, run_events.FAILED, 1, text)
    (event,), faults = run_events.story_with_faults(tmp_path)
    assert (event.text, faults) == (text, [])


def test_invalid_lines_are_named_and_the_others_read(tmp_path: Path) -> None:
    run_events.append_event(tmp_path, run_events.STARTED, 0, "started")
    with (tmp_path / run_events.FILE).open("ab") as file:
        file.write(b'{"time": 1, "kind": "failed", "step": -1, "text": "", "details": []}\nnot JSON\n\xff\n')
    run_events.append_event(tmp_path, run_events.FINISHED, 3, "finished")
    story, faults = run_events.story_with_faults(tmp_path)
    assert [event.kind for event in story] == ["started", "finished"]
    assert [fault.partition(" of ")[0] for fault in faults] == ["line 2", "line 3", "line 4"]
    assert "`step` is `-1`" in faults[0]


def test_file_that_is_no_list_of_events_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / run_events.FILE
    os.mkfifo(path)
    assert run_events.story_with_faults(tmp_path) == (
        [],
        ["events.jsonl cannot be read: it is a pipe, not a regular file"],
    )
    path.unlink()
    path.touch()
    os.truncate(path, 65 << 20)
    assert run_events.story_with_faults(tmp_path) == ([], ["events.jsonl cannot be read: it is larger than 64 MiB"])
