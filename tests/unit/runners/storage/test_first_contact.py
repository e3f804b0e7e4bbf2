"""The comparisons before the first step, and the file that they stand in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.training import comparing_worker
from recipes.training.comparing_worker import comparisons_of
from rlinf_core.runners.storage.first_contact import (
    FILE,
    SKIPPED,
    ContactCheck,
    Difference,
    FirstContact,
    note_comparisons,
    read_comparisons,
)


def test_a_comparison_keeps_what_it_found_and_its_time() -> None:
    contact = FirstContact("actor")
    contact.compare("logits", "transformers", lambda: Difference(1e-5, 1e-3, "48 tokens"))
    contact.compare("golds", "rule", lambda: None)
    contact.keep("rows", "their keys")
    logits, rows = contact.take()
    assert (logits.component, logits.verdict, logits.largest_difference, logits.bound) == (
        "actor",
        "agrees",
        1e-5,
        1e-3,
    )
    assert logits.seconds is not None
    assert logits.seconds >= 0
    assert (rows.what, rows.seconds) == ("rows", None)
    assert contact.take() == []


def test_expensive_comparisons_are_skipped_and_named() -> None:
    contact, made = FirstContact("actor", skips=True), list[str]()
    contact.compare("logits", "transformers", lambda: made.append("logits"))
    contact.compare("template", "roles", lambda: made.append("template") or Difference(), cheap=True)
    assert made == ["template"]
    assert [(check.what, check.verdict, check.note) for check in contact.take()] == [
        ("logits", "skipped", SKIPPED),
        ("template", "agrees", ""),
    ]


def test_processes_that_compare_the_same_have_one_line(tmp_path: Path) -> None:
    ranks = [
        ContactCheck("actor", "logits", "transformers", "agrees", 1e-5, 1e-3, 0.5),
        ContactCheck("actor", "logits", "transformers", "agrees", 1e-4, 1e-3, 0.25),
        ContactCheck("reward", "golds", "rule", "differs", note="1 of 8"),
        ContactCheck("reward", "golds", "rule", note="8"),
    ]
    note_comparisons(tmp_path, ranks)
    logits, golds = read_comparisons(tmp_path)
    assert (logits.largest_difference, logits.seconds) == (1e-4, 0.5)
    assert (golds.verdict, golds.note) == ("differs", "1 of 8")
    content = json.loads((tmp_path / FILE).read_text())
    assert (content["seconds"], content["skipped"], content["checks"][0]["with"]) == (0.5, 0, "transformers")


def test_a_later_comparison_replaces_an_earlier_one(tmp_path: Path) -> None:
    note_comparisons(tmp_path, [ContactCheck("env", "actions", "range", "differs"), ContactCheck("env", "a", "b")])
    note_comparisons(tmp_path, [ContactCheck("env", "actions", "range")])
    assert {check.what: check.verdict for check in read_comparisons(tmp_path)} == {"actions": "agrees", "a": "agrees"}


def test_a_difference_that_is_no_number_is_written(tmp_path: Path) -> None:
    contact = FirstContact("actor")
    contact.keep("logits", "transformers", Difference(math.nan, 1e-3, "48 tokens", agrees=False))
    note_comparisons(tmp_path, contact.take())
    (check,) = read_comparisons(tmp_path)
    assert (check.verdict, check.largest_difference, check.note) == (
        "differs",
        None,
        "the difference is nan; 48 tokens",
    )


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"what": 3}',
        '{"schema": "rlinf.first_contact/1", "checks": 3}',
        '{"schema": "rlinf.first_contact/1", "checks": [3, {"what": "x"}, {"component": "a", "what": "x", "with": "y",'
        ' "verdict": "fine", "note": ""}]}',
    ],
)
def test_a_file_of_another_shape_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert read_comparisons(tmp_path) == []


def test_groups_that_never_compare_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [[ContactCheck("actor", "a", "b")], [ContactCheck("actor", "c", "d")]]
    group: Any = SimpleNamespace(compared=lambda: SimpleNamespace(wait=lambda: checks))
    monkeypatch.setattr(comparing_worker, "wait_together", lambda *calls: [call.wait() for call in calls])
    assert [check.what for check in comparisons_of([object(), group])] == ["a", "c"]
