"""docs/embodied.md: its entry program and its loop are those that a test runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
RUN = REPOSITORY / "tests/integration/runtime/seeds"


def statements(text: str) -> list[str]:
    """Return the statements of a program, whatever their layout and comments."""
    return [ast.dump(statement) for statement in ast.parse(text).body]


def test_programs_of_the_page_are_those_that_run() -> None:
    page = (REPOSITORY / "docs/embodied.md").read_text(encoding="utf-8")
    entry, loop = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert statements(entry) == statements((RUN / "training_flow.txt").read_text(encoding="utf-8"))
    assert statements(loop) == statements((RUN / "training_loop.txt").read_text(encoding="utf-8"))[-1:]
