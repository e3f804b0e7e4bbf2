"""Durations of timed calls by rows, and what `profile.json` makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.runners.storage.profile import write_profile
from rlinf_core.worker import call_record
from rlinf_core.worker.call_record import CallRecord, add_call, call_records
from rlinf_core.worker.timer import timer


@pytest.fixture(autouse=True)
def _none_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_record, "_calls", {})


def test_calls_are_kept_by_tag_and_rows() -> None:
    for rows in (8, 8, 16):
        with timer("step", rows):
            pass
    with timer("other"):
        pass
    assert [(call.tag, call.rows, call.calls) for call in call_records()] == [
        ("step", 8, 2),
        ("step", 16, 1),
        ("other", 0, 1),
    ]


def test_large_sizes_are_kept_together_by_two_digits() -> None:
    for rows in (1230, 1280, 1310, 99, 98):
        add_call("learn", rows, 1.0)
    assert {(call.rows, call.calls) for call in call_records()} == {(1255, 2), (1310, 1), (99, 1), (98, 1)}


def test_the_newest_durations_of_a_bounded_number_are_kept() -> None:
    for rows in range(1000):
        add_call(f"tag {rows}", 1, 1.0)
    assert len(call_records()) < 1000
    for seconds in range(200):
        add_call("tag 0", 1, float(seconds))
    (first, *_) = call_records()
    assert (first.calls, first.newest[-1], len(first.newest)) == (201, 199.0, 64)


def test_the_profile_of_a_component_is_over_its_ranks(tmp_path: Path) -> None:
    add_call("answer", 20, 0.0)
    ranks = [[CallRecord("env/step", 8, 2, 0.4, (0.1, 0.3))], [CallRecord("env/step", 8, 1, 0.9, (0.9,))]]
    write_profile(tmp_path / "profile.json", {"env": ranks})
    record: Any = json.loads((tmp_path / "profile.json").read_text())
    env, answer = record["rows"]
    assert {**env, "quantiles": [env["quantiles"][at] for at in (0, 10, 20)]} == {
        "component": "env",
        "phase": "env/step",
        "processes": 2,
        "rows": 8,
        "calls": 3,
        "seconds": 1.3,
        "slowest": 0.9,
        "quantiles": [0.1, 0.3, 0.9],
    }
    assert (answer["component"], answer["rows"], answer["quantiles"]) == ("driver", 20, [])
