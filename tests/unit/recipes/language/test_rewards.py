from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.language.rewards.overlong import overlong_penalty
from recipes.language.rewards.rules import RULES, boxed_content, last_number
from recipes.language.rewards.scoring import Item, Scorer
from rlinf_core.errors import ConfigError

FUNCTIONS = """
import os, time

def score(text, answer, row):
    print("printed by the function")
    if text == "nan":
        return float("nan")
    if text == "raise":
        raise RuntimeError("no idea")
    if text == "hang":
        time.sleep(1000)
    if text == "die":
        os._exit(3)
    if text == "wrong type":
        return {"style": 1}
    return {"reward": len(text), "style": row.get("style", 0)}

async def later(text, answer):
    return 0.5

constant = 3
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module with reward functions."""
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rewards"


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
    assert last_number(f"first 17, then {value}.") == value


@given(st.text(alphabet="ab{}\\ boxed", max_size=40))
def test_what_is_boxed_has_matching_braces(text: str) -> None:
    found = boxed_content(text)
    if found is not None:
        assert found.count("{") == found.count("}")
        assert f"\\boxed{{{found}}}" in text


def test_right_and_wrong_answers_have_the_rewards_that_are_set() -> None:
    scorer = Scorer("exact", correct=2.0, incorrect=-1.0)

    assert scorer.score(Item(text="7", answer="7")).reward == 2.0
    assert scorer.score(Item(text="8", answer="7")).reward == -1.0


def test_an_answer_that_cannot_be_scored_costs_itself(functions: str) -> None:
    with Scorer(f"{functions}:score", incorrect=-1.0, timeout=1.0) as scorer:
        found = {
            text: scorer.score(Item(text=text, answer="", row={"style": 2}))
            for text in ("ab", "nan", "raise", "hang", "die", "wrong type", "abc")
        }

    assert (found["ab"].reward, found["abc"].reward) == (2.0, 3.0)
    assert found["abc"].parts == {"style": 2.0}
    failed = {text: score.failure for text, score in found.items() if score.failure}
    assert failed == {"nan": "error", "raise": "error", "hang": "timeout", "die": "crash", "wrong type": "error"}
    assert all(found[text].reward == -1.0 for text in failed)
    assert "no idea" in found["raise"].reason


def test_an_async_function_is_awaited(functions: str) -> None:
    with Scorer(f"{functions}:later") as scorer:
        assert scorer.score(Item(text="x", answer="")).reward == 0.5


@pytest.mark.parametrize("name", ["nothing", "constant"])
def test_a_function_that_is_not_there_is_told_at_once(functions: str, name: str) -> None:
    with Scorer(f"{functions}:{name}") as scorer, pytest.raises(ConfigError, match="cannot be loaded"):
        scorer.score(Item(text="x", answer=""))


def test_expressions_are_compared_and_endless_ones_are_given_up() -> None:
    pytest.importorskip("math_verify")
    with Scorer("math", timeout=20.0) as scorer:
        assert scorer.score(Item(text=r"$\frac{2}{4}$", answer="1/2")).reward == 1
        assert scorer.score(Item(text="$x^2+2x+1$", answer="$(x+1)^2$")).reward == 1
        assert scorer.score(Item(text="$3$", answer="4")).reward == 0
    with Scorer("math", timeout=1.0) as scorer:
        assert scorer.score(Item(text="$9^{9^{9^9}}$", answer="2")).failure in {"timeout", "error"}


@pytest.mark.parametrize(("length", "penalty"), [(10, 0.0), (16, 0.0), (18, -0.5), (20, -1.0), (30, -1.0)])
def test_answers_near_their_limit_are_punished(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=20, margin=4) == penalty
