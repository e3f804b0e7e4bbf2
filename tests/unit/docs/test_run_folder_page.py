"""The tables of `dev/run-files.md` list the fields of the files, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlinf_core.runners.storage.checkpoint import Manifest
from rlinf_core.runners.storage.run_state import RunState

PAGE = Path(__file__).parents[3] / "docs" / "dev" / "run-files.md"
_FIELD = re.compile(r"`(\w+)`")


def listed(head: str) -> list[str]:
    """The names in the first column of the table with this head."""
    table = PAGE.read_text(encoding="utf-8").split(f"| {head} |", 1)[1].split("\n\n", 1)[0]
    rows = [line for line in table.splitlines()[2:] if line.startswith("|")]
    return [name for row in rows for name in _FIELD.findall(row.split("|")[1])]


@pytest.mark.parametrize(
    ("head", "fields"),
    [
        ("field", [*RunState.model_fields]),
        ("field of `manifest.json`", [*(set(Manifest.model_fields) - {"schema_"})]),
    ],
)
def test_a_table_lists_exactly_the_fields_of_its_model(head: str, fields: list[str]) -> None:
    names = listed(head)
    assert sorted(names) == sorted(["schema", *fields])
