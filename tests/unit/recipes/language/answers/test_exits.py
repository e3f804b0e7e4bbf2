"""Bad ends of answers: the page about rewards has a row for each."""

from __future__ import annotations

import re
from pathlib import Path

from recipes.language.answers.exits import EXIT_OF_SCORING, Cause, Exit

PAGE = Path(__file__).parents[5] / "docs" / "rewards-and-data.md"


def test_the_page_has_one_row_for_every_end() -> None:
    rows = re.findall(r"^\| `((?:exit|failed)/\w+)` \| \S.*\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [*(f"exit/{end}" for end in Exit), *(f"failed/{end}" for end in Cause)]
    assert set(EXIT_OF_SCORING) == {Cause.TIMEOUT, Cause.ERROR, Cause.CRASH}
