"""Bad ends of answers: the page has the table of the code, which has every end."""

from __future__ import annotations

from pathlib import Path

from recipes.language.answers.exits import EXIT_OF_SCORING, TABLE, Cause, Exit, markdown_table

PAGE = Path(__file__).parents[5] / "docs" / "rewards-and-data.md"


def test_the_page_has_the_table() -> None:
    assert f"\n\n{markdown_table()}\n\n" in PAGE.read_text(encoding="utf-8")


def test_every_end_has_one_row() -> None:
    # An exit and a cause of the same name are equal texts, and different ends.
    assert [(type(row.end), row.end) for row in TABLE] == [(type(end), end) for end in (*Exit, *Cause)]
    assert set(EXIT_OF_SCORING) == {Cause.TIMEOUT, Cause.ERROR, Cause.CRASH}
