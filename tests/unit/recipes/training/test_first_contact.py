from __future__ import annotations

from pathlib import Path

from recipes.training.first_contact import FILE, Comparison, note_comparisons, read_comparisons


def test_comparisons_are_kept_and_replaced(tmp_path: Path) -> None:
    note_comparisons(tmp_path, [Comparison("observations", "spec"), Comparison("actions", "range", ok=False)])
    note_comparisons(tmp_path, [Comparison("actions", "range", largest_difference=0.5)])
    rows = {row["what"]: (row["ok"], row["largest_difference"]) for row in read_comparisons(tmp_path)}
    assert rows == {"observations": (True, None), "actions": (True, 0.5)}


def test_a_file_that_is_no_list_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"what": 3}')
    assert read_comparisons(tmp_path) == []
