"""Verdicts of rules on answers as people and models write them."""

from __future__ import annotations

import json
import os
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.language.rewards.matching.cleaning import boxed_content, cleaned
from recipes.language.rewards.matching.final_answer import answer_number
from recipes.language.rewards.matching.readings import read, text_of
from recipes.language.rewards.matching.rules import RULES
from recipes.language.rewards.right_answers import gold_verdict
from recipes.language.rewards.scoring import Item, Scorer
from recipes.language.workers.reward_worker import overlong_penalty

PAIRS: Final = Path(__file__).parents[4] / "data" / "answers" / "pairs.jsonl"
# A folder of .jsonl files whose rows have `gold`, `text` and `right`, the verdict of PRM800K's grader.
GRADED: Final = "RLINF_GRADED_ANSWERS"
MARKS: Final = "0123456789.,-+/^{}()[]\\$%= abx\u2212\u2013\u202f\u00bd\u00b2" + '"'


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_table_has_pairs_of_each_verdict() -> None:
    rows = rows_of(PAIRS)
    assert len(rows) >= 400
    assert len({(row["gold"], row["text"]) for row in rows}) == len(rows)
    for rule in ("math", "number"):
        right = sum(row[rule] for row in rows)
        assert 100 < right < len(rows) - 100


@pytest.mark.parametrize("rule", ["number", "math"])
def test_a_rule_judges_every_pair_of_the_table(rule: str) -> None:
    differing = [row for row in rows_of(PAIRS) if RULES[rule](row["text"], row["gold"]).right != row[rule]]
    assert [(row["kind"], row["gold"], row["text"]) for row in differing] == []


@pytest.mark.nightly
def test_math_agrees_with_the_grader_of_prm800k() -> None:
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
    assert RULES["math"](r"\boxed{on one}", "no one").right == 0


@pytest.mark.parametrize("rule", ["exact", "boxed", "math"])
def test_an_empty_right_answer_is_no_answers(rule: str) -> None:
    assert RULES[rule]("\\boxed{}", "").right == 0
    assert RULES[rule]("", " ").right == 0
    assert "empty" in RULES[rule]("7", "").reason


@pytest.mark.parametrize(
    ("rule", "text", "answer", "right"),
    [
        ("exact", " 7\n", "7", 1),
        ("exact", "7.0", "7", 0),
        ("boxed", r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        ("boxed", r"\boxed{1} no, \boxed{ 2 }", "2", 1),
        ("boxed", "2", "2", 0),
        ("number", "it is 1,234.50", "1234.5", 1),
        ("number", "3/4", "0.75", 1),
        ("number", "-2 or 2", "-2", 0),
        ("number", "nothing", "2", 0),
        ("number", "1/0", "2", 0),
        ("number", "1" * 5000, "2", 0),
        ("number", "1e999999999", "2", 0),
    ],
)
def test_rules(rule: str, text: str, answer: str, right: float) -> None:
    assert RULES[rule](text, answer).right == right


@given(st.fractions(max_denominator=1000))
def test_the_last_number_of_a_text_is_read_exactly(value: Fraction) -> None:
    number = answer_number(f"first 17, then {value}.")
    assert number is not None
    assert number.value == value


@given(st.text(alphabet="ab{}\\ boxed", max_size=40))
def test_what_is_boxed_has_matching_braces(text: str) -> None:
    result = boxed_content(text)
    if result is not None:
        assert result.count("{") == result.count("}")
        # A list of neighbouring boxes is joined by ", ", which this alphabet lacks.
        assert all(part in text for part in result.split(", "))


def test_right_and_wrong_answers_have_the_rewards_that_are_set() -> None:
    scorer = Scorer("exact", correct=2.0, incorrect=-1.0)
    results = [scorer.score(Item(text=text, answer="7")) for text in ("7", "8")]
    assert [(result.reward, result.correct) for result in results] == [(2.0, True), (-1.0, False)]


def test_expressions_are_compared_and_endless_ones_are_given_up() -> None:
    with Scorer("math", timeout=20.0) as scorer:
        for text, answer, right in (
            (r"$\frac{2}{4}$", "1/2", 1),
            ("$x^2+2x+1$", "$(x+1)^2$", 1),
            ("$3$", "4", 0),
        ):
            assert scorer.score(Item(text=text, answer=answer)).reward == right
    with Scorer("math", timeout=1.0) as scorer:
        for endless in ("$9^{9^{9^9}}$", "$10000000!$"):
            score = scorer.score(Item(text=endless, answer="2+x"))
            assert (score.failure, score.exit) == ("", "time_limit")
            # The next one is scored, and has not to wait for another process.
            assert scorer.score(Item(text=r"$\frac{4}{2}+x$", answer="2+x")).reward == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    "endless",
    [
        *("$9^{9^{9^9}}$", "$(1+x)^{100000}$", "$10000000!$", "$2^{2^{100}}$"),
        pytest.param("$" + "+".join(map(str, range(20000))) + "$", id="sum"),
        pytest.param("$" + "(" * 400 + "1" + ")" * 400 + "$", id="brackets"),
        *(r"$\int_0^1 x^{x^{x^x}} dx$", r"$\sum_{n=1}^{10^{10}} \frac{1}{n^2}$", r"$\binom{10^9}{10^8}$"),
    ],
)
def test_no_expression_outlasts_the_limit(endless: str) -> None:
    with Scorer("math", timeout=1.0) as scorer:
        assert scorer.score(Item(text=endless, answer="2+x")).reward == 0
        assert scorer.score(Item(text=r"$\frac{4}{2}+x$", answer="2+x")).reward == 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [("1,000", "1000.0"), ("2/4", "0.5"), (r"\boxed{7}", "7.0"), (r"\boxed{2,1}", "1,2"), (r"\boxed{(A)}", "A")],
)
def test_what_the_grammar_reads_needs_no_math_verify(text: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert RULES["math"](text, answer).right == 1


@pytest.mark.parametrize(("length", "penalty"), [(10, 0.0), (16, 0.0), (18, -0.5), (20, -1.0), (30, -1.0)])
def test_answers_near_their_limit_are_punished(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=20, margin=4) == penalty


@pytest.mark.parametrize(
    ("rule", "answer", "reason"),
    [
        ("number", "(1,2)", "not a number"),
        *((rule, "", "empty") for rule in ("number", "math")),
        ("math", "\\frac{", "cannot parse"),
        ("boxed", "  ", "empty"),
    ],
)
def test_a_right_answer_that_nothing_equals_is_told(rule: str, answer: str, reason: str) -> None:
    verdict = gold_verdict(rule, answer)
    assert verdict.right == 0
    assert reason in verdict.reason


def test_right_answers_are_right_by_their_own_rules() -> None:
    golds = ("5", "1,2", "\\$18.90", "(1,2)", "\\text{even}", "A", "x^2+1", "\\begin{pmatrix}1\\\\2\\end{pmatrix}")
    assert [gold for gold in golds if gold_verdict("math", gold).right != 1] == []
    assert gold_verdict("number", "She has 5.\n#### 5").right == 1
