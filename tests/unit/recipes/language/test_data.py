from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.language.data.problems import training_order
from recipes.language.data.sources import Joined, Sums, read_file
from rlinf_core.errors import ConfigError


@given(st.integers(1, 30), st.integers(0, 100), st.integers(0, 60), st.integers(0, 5))
def test_every_epoch_takes_each_problem_once_wherever_one_begins(size: int, start: int, count: int, seed: int) -> None:
    whole = training_order(size, 0, start + count, seed=seed, shuffle=True)

    assert training_order(size, start, count, seed=seed, shuffle=True) == whole[start:]
    for epoch in range((start + count) // size):
        assert sorted(whole[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_the_order_depends_on_the_seed_and_can_be_left_as_it_is() -> None:
    first, second = (training_order(50, 0, 50, seed=seed, shuffle=True) for seed in (0, 1))

    assert first != second
    assert training_order(5, 3, 4, seed=0, shuffle=False) == [3, 4, 0, 1]


@pytest.mark.parametrize("digits", [2, 3, 5])
def test_sums_of_evaluation_are_none_of_training(digits: int) -> None:
    held_out, train = Sums(digits, held_out=True, size=100), Sums(digits, size=100)

    evaluated = {held_out[index].prompt for index in range(len(held_out))}
    trained = {train[index].prompt for index in range(0, len(train), max(1, len(train) // 5000))}
    assert len(evaluated) == 100
    assert not evaluated & trained


def test_sums_are_right() -> None:
    sums = Sums(2)
    for index in range(0, len(sums), 97):
        problem = sums[index]
        first, second = problem.prompt.removesuffix("=").split("+")
        assert int(first) + int(second) == int(problem.answer)


def test_sums_of_one_digit_are_all_hundred() -> None:
    assert {Sums(1)[index].prompt for index in range(100)} == {f"{a}+{b}=" for a in range(10) for b in range(10)}


def test_a_file_has_a_problem_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    rows = [{"q": "1+1", "a": 2, "difficulty": "easy"}, {"q": "2+2", "a": 4}]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")

    found = read_file(str(file), "q", "a")

    assert [(each.prompt, each.answer, each.difficulty) for each in (found[0], found[1])] == [
        ("1+1", "2", "easy"),
        ("2+2", "4", ""),
    ]
    assert found[0].source == "some"
    assert Joined([found, found])[3].prompt == "2+2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no rows"),
        ('{"q": 1}\n', r"some.jsonl:1: there is no key `a`"),
        ('{"q": 1, "a": 2}\n{"q": 1,\n', r"some.jsonl:2: the line is not JSON"),
        ("[1]\n", r"some.jsonl:1: the line is not a JSON object"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(text)

    with pytest.raises(ConfigError, match=words):
        read_file(str(file), "q", "a")


def test_a_file_that_is_not_there_or_not_text_is_told(tmp_path: Path) -> None:
    binary = tmp_path / "some.jsonl"
    binary.write_bytes(b"\xff\xfe{}")

    with pytest.raises(ConfigError, match="not UTF-8"):
        read_file(str(binary), "q", "a")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(str(tmp_path / "nothing.jsonl"), "q", "a")
