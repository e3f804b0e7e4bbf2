"""docs/embodied.md: its entry program and its loop are those that a test runs."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
SEEDS = REPOSITORY / "tests/integration/runtime/seeds"


def lines(text: str) -> list[str]:
    """Return the lines of a program without blanks and comments."""
    return [line.rstrip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def test_programs_of_the_page_are_those_that_run() -> None:
    page = (REPOSITORY / "docs/embodied.md").read_text(encoding="utf-8")
    entry, loop = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert lines(entry) == lines((SEEDS / "training_flow.txt").read_text(encoding="utf-8"))
    whole = lines((SEEDS / "training_loop.txt").read_text(encoding="utf-8"))
    assert lines(loop) == whole[-len(lines(loop)) :]
