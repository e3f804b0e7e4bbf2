"""Verdicts of `math` and `number` on answers as people and models write them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.language.rewards.matching.cleaning import cleaned
from recipes.language.rewards.matching.final_answer import answer_number
from recipes.language.rewards.matching.readings import read, text_of
from recipes.language.rewards.matching.rules import RULES

PAIRS: Final = Path(__file__).parents[4] / "data" / "answers" / "pairs.jsonl"
# A folder of .jsonl files whose rows have `gold`, `text` and `right`, the verdict of PRM800K's grader.
GRADED: Final = "RLINF_GRADED_ANSWERS"
MARKS: Final = "0123456789.,-+/^{}()[]\\$%= abx\u2212\u2013\u202f\u00bd\u00b2" + '"'


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def misjudged(rule: str) -> list[str]:
    rows = rows_of(PAIRS)
    return [
        f"{row['kind']}: gold {row['gold']!r}, {row['text']!r} is {'right' if row[rule] else 'wrong'}"
        for row in rows
        if RULES[rule](row["text"], row["gold"]).right != row[rule]
    ]


def test_the_table_has_pairs_of_each_verdict() -> None:
    rows = rows_of(PAIRS)

    assert len(rows) >= 400
    assert len({(row["gold"], row["text"]) for row in rows}) == len(rows)
    for rule in ("math", "number"):
        right = sum(row[rule] for row in rows)
        assert 100 < right < len(rows) - 100


def test_number_judges_every_pair_of_the_table() -> None:
    assert misjudged("number") == []


def test_math_judges_every_pair_of_the_table() -> None:
    pytest.importorskip("math_verify")
    assert misjudged("math") == []


@pytest.mark.nightly
def test_math_agrees_with_the_grader_of_prm800k() -> None:
    pytest.importorskip("math_verify")
    folder = os.environ.get(GRADED)
    if not folder:
        pytest.skip(f"{GRADED} names no folder of graded answers")
    rows = [row for file in sorted(Path(folder).glob("*.jsonl")) for row in rows_of(file)]
    differing = [row for row in rows if bool(RULES["math"](row["text"], row["gold"]).right) != row["right"]]

    assert len(rows) >= 800
    assert len(differing) <= 0.01 * len(rows), [(row["gold"], row["text"][-80:]) for row in differing[:10]]


@given(st.text(alphabet=MARKS, max_size=30))
def test_any_text_is_read(text: str) -> None:
    assert isinstance(text_of(read(text)), str)
    answer_number(text)
    answer_number(f"so \\boxed{{{text}}} and the answer is {text}.")


@given(st.text(alphabet=MARKS, max_size=30))
def test_one_spelling_is_the_spelling_of_itself(text: str) -> None:
    assert cleaned(cleaned(text)) == cleaned(text)


@given(st.integers(), st.integers())
def test_digits_run_together_only_within_a_number(first: int, second: int) -> None:
    """Two numbers that a comma and a blank part are never one, whatever their digits are."""
    joined = f"{first}{abs(second)}"
    assert RULES["number"](rf"\boxed{{{joined}}}", f"({first}, {second})").right == 0
    assert answer_number(f"the roots are {first}, {second}") is None


@given(st.integers(min_value=0, max_value=10**15))
def test_thousands_are_read_as_they_are_written(value: int) -> None:
    for written in (f"{value:,}", f"{value:,}".replace(",", "{,}"), f"{value:,}".replace(",", r"\,")):
        assert RULES["number"](rf"It is \boxed{{{written}}}.", str(value)).right == 1
        assert RULES["number"](f"It is {written} in all", str(value)).right == 1


def test_a_percent_is_read_as_prm800k_does() -> None:
    assert RULES["number"](r"\boxed{50\%}", "50").right == 1
    assert RULES["number"](r"\boxed{50\%}", "0.5").right == 0


def test_prose_is_no_product_of_letters() -> None:
    """One word that only prose has is enough: letters of equal number would be equal."""
    pytest.importorskip("math_verify")
    assert RULES["math"](r"\boxed{on one}", "no one").right == 0


@pytest.mark.parametrize("rule", ["exact", "boxed", "math"])
def test_an_empty_right_answer_is_no_answers(rule: str) -> None:
    assert RULES[rule]("\\boxed{}", "").right == 0
    assert RULES[rule]("", " ").right == 0
    assert "empty" in RULES[rule]("7", "").reason
