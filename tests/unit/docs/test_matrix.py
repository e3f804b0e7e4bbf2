"""docs/support.md: what its tables name exists, and marks say when a test runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import matrix

TABLE = """
Engines:
  columns: [CPU]
  rows:
    torch: {{cells: [{cell}], run: here, tests: ["{test}"]}}
"""
TEST = "integration/recipes/embodied/test_embodied_learns.py::test_ppo_learns_to_pick"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(matrix, "DOCS", tmp_path)
    (tmp_path / "support.md").write_text("above\n<!-- matrix -->\nold\n<!-- end of matrix -->\nbelow\n")
    return tmp_path / "support.yaml"


def test_a_table_is_made_anew(page: Path) -> None:
    page.write_text(TABLE.format(cell="R 2026-11-25", test=TEST))
    text = matrix.support_page()
    assert "| torch | **R** 2026-11-25 | here | `test_embodied_learns` (nightly) |" in text
    assert re.search(r"^above\n.*^below\n", text, re.MULTILINE | re.DOTALL)
    assert "old" not in text


@pytest.mark.parametrize(
    ("cell", "test", "words"),
    [
        ("yes", TEST, "are no cells"),
        ("R", TEST, "are no cells"),
        ("C", "unit/test_nothing.py", "there is no test"),
        ("C", TEST + "_twice", "there is no test"),
    ],
)
def test_what_does_not_exist_is_an_error(page: Path, cell: str, test: str, words: str) -> None:
    page.write_text(TABLE.format(cell=cell, test=test))
    with pytest.raises(ValueError, match=words):
        matrix.support_page()
