from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.language.config.problem_config import LanguageDataConfig
from recipes.language.data import problem_sources
from recipes.language.data.load_problems import data_set_names, load_problems, mixed
from recipes.language.data.problem_sources import Joined, ReasoningGym, Sums, check_file, read_file
from recipes.language.data.problems import Problem, training_order
from recipes.language.data.prompts import PromptEncoder
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

    text = read_file(str(file), "q", "a")

    assert [(item.prompt, item.answer, item.difficulty) for item in (text[0], text[1])] == [
        ("1+1", "2", "easy"),
        ("2+2", "4", ""),
    ]
    assert text[0].source == "some"
    assert Joined([text, text])[3].prompt == "2+2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no rows"),
        ('{"q": 1}\n', r"some.jsonl:1: there is no key `a`"),
        ('{"q": 1, "a": 2}\n{"q": 1,\n', r"some.jsonl:2: the line is not JSON"),
        ('{"q": 1, "a": 2}\n' + "[" * 200_000 + "\n", r"some.jsonl:2: the line is nested more than 100 levels deep"),
        ('{"q": 1, "a": ' + "9" * 5000 + "}\n", r"some.jsonl:1: the line holds an integer of too many digits"),
        ('{"q": 1, "a": NaN}\n', r"some.jsonl:1: the line holds NaN"),
        ('{"q": 1, "a": 1e999}\n', r"some.jsonl:1: the line holds a number that is too large"),
        ('{"q": 1, "a": 2, "a": 3}\n', r"some.jsonl:1: the line names the key 'a' twice"),
        ('{"q": "\\ud800", "a": 2}\n', r"some.jsonl:1: the line holds half of a character"),
        ("[1]\n", r"some.jsonl, item 0: the row is not a JSON object"),
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


def test_a_parquet_file_has_a_problem_in_each_row(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "some.parquet"
    rows = [
        {"prompt": "1+1", "reward_model": {"ground_truth": "2"}},
        {"prompt": "2+2", "reward_model": {"ground_truth": "4"}},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), file)

    text = read_file(str(file), "prompt", "reward_model.ground_truth")

    assert [text[index].answer for index in range(2)] == ["2", "4"]
    assert text[1].row == rows[1]
    check_file(str(file), "prompt", "reward_model.ground_truth")
    for read in (read_file, check_file):
        with pytest.raises(ConfigError, match="row 0: there is no key `answer`"):
            read(str(file), "prompt", "answer")
    parquet.write_table(arrow.table({"prompt": [], "answer": []}), file)
    for read in (read_file, check_file):
        with pytest.raises(ConfigError, match="has no rows"):
            read(str(file), "prompt", "answer")
    file.write_bytes(b"PAR2")
    for read in (read_file, check_file):
        with pytest.raises(ConfigError, match="not a Parquet file"):
            read(str(file), "prompt", "answer")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": 3, "answer": "2"}, "neither a text nor messages"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, "neither a text nor messages"),
        ({"prompt": "1+1", "answer": None}, "there is no answer"),
        ({"prompt": "1+1", "answer": {"ground_truth": "2"}}, "there is no answer"),
        ({"prompt": "is it?", "answer": True}, "there is no answer"),
        ({"prompt": "", "answer": "2"}, "the prompt under `prompt` is empty"),
        ({"prompt": "<image>1+1", "answer": "2", "images": [{"bytes": "iVBO"}]}, "there are media in `images`"),
        ({"prompt": "<video>how many?", "answer": "2", "video": "a.mp4"}, "there are media in `video`"),
        ({"prompt": [], "answer": "2"}, "neither a text nor messages"),
        # Messages that a table of texts holds as Python writes them, or cut off.
        ({"prompt": "[{'role': 'user', 'content': 'a'}]", "answer": "2"}, "neither a text nor messages"),
        ({"prompt": ' [{"role": "user", "content": "a"}', "answer": "2"}, "neither a text nor messages"),
        ({"prompt": '[{"content": [{"text": "a"}], "role": "user"}]', "answer": "2"}, "neither a text nor messages"),
    ],
)
def test_a_row_that_is_no_problem_is_told(tmp_path: Path, row: dict[str, object], words: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text(json.dumps(row))

    with pytest.raises(ConfigError, match=f"some.jsonl:1: .*{words}"):
        read_file(str(file), "prompt", "answer")


def test_list_with_one_answer_is_the_answer(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "1+1", "solutions": ["\\\\boxed{2}"]}\n')
    assert read_file(str(file), "prompt", "solutions")[0].answer == r"\boxed{2}"
    file.write_text('{"prompt": "1+1", "solutions": ["2", "two"]}\n')
    with pytest.raises(ConfigError, match="there is no answer under `solutions`"):
        check_file(str(file), "prompt", "solutions")


def test_numbers_of_few_bits_keep_their_decimal_form(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    written = [0.1, 1e-7, 16777216.0, 3.4028234663852886e38, 0.30000001192092896]
    file = tmp_path / "some.parquet"
    table = {"prompt": ["a"] * 5, "answer": arrow.array(written, arrow.float32())}
    parquet.write_table(arrow.table(table), file)
    problems = read_file(str(file), "prompt", "answer")
    assert [problems[row].answer for row in range(5)] == ["0.1", "1e-07", "16777216.0", "3.4028235e+38", "0.3"]
    table["answer"] = arrow.array([float("nan")] * 5, arrow.float32())
    parquet.write_table(arrow.table(table), file)
    with pytest.raises(ConfigError, match="row 0: there is no answer"):
        check_file(str(file), "prompt", "answer")


def test_only_the_first_rows_are_checked_before_a_run(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "1", "answer": 1}\n' * 3 + "broken")

    check_file(str(file), "prompt", "answer", rows=3)
    with pytest.raises(ConfigError, match=":4: the line is not JSON"):
        check_file(str(file), "prompt", "answer", rows=4)


def test_data_sets_are_called_by_what_tells_their_files_apart() -> None:
    assert data_set_names(["/data/gsm8k/test.parquet", "/data/math/test.parquet"]) == ["gsm8k_test", "math_test"]
    assert data_set_names(["a.jsonl", "b.jsonl"]) == ["a", "b"]
    assert data_set_names(["a.jsonl", "a.jsonl"]) == ["a_0", "a_1"]
    assert data_set_names([]) == []


def test_every_tenth_problem_of_files_is_held_back(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(number), "answer": number}) + "\n" for number in range(30)))
    config = LanguageDataConfig.model_validate({"train_data_paths": str(file)})

    train, evaluation = (load_problems(config, evaluation=value) for value in (False, True))

    held_back = {evaluation[index].prompt for index in range(len(evaluation))}
    assert held_back == {"9", "19", "29"}
    assert not held_back & {train[index].prompt for index in range(len(train))}


class Gym:
    """reasoning-gym, as far as it is used: problem i of a data set is made from its seed + i."""

    def create_dataset(self, task: str, size: int, seed: int, **config: object) -> Gym:
        if task != "chain_sum":
            raise ValueError(f"Dataset '{task}' not registered")
        self.seed = seed
        return self

    def __getitem__(self, index: int) -> dict[str, object]:
        metadata = {"difficulty": {"num_terms": (2, 6), "decimals": 0}}
        return {"question": f"q{self.seed + index}", "answer": str(self.seed + index), "metadata": metadata}

    def score_answer(self, answer: str, entry: dict[str, object]) -> float:
        return 1.0 if answer == entry["answer"] else 0.01


def test_reasoning_gym_problems_use_disjoint_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_sources.importlib, "import_module", lambda _: Gym())
    seeds: list[tuple[int, int]] = []
    for seed in (0, 1):
        config = LanguageDataConfig(type="reasoning_gym", task="chain_sum", train_size=5, val_size=3, seed=seed)
        for evaluation in (False, True):
            problems = load_problems(config, evaluation=evaluation)
            first = int(problems[0].answer)
            seeds.append((first, first + len(problems)))

    assert [last - first for first, last in seeds] == [5, 3, 5, 3]
    ordered = sorted(seeds)
    assert all(before[1] <= after[0] for before, after in pairwise(ordered))
    problem = load_problems(config, evaluation=True)[0]
    assert (problem.source, problem.difficulty) == ("chain_sum", "num_terms=2-6,decimals=0")


def test_reasoning_gym_scores_and_says_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_sources.importlib, "import_module", lambda _: Gym())
    task = ReasoningGym("chain_sum", 2, 7)

    assert task.score("7", task[0].row) == 1.0
    with pytest.raises(ConfigError, match="cannot make the task `sudokku`"):
        ReasoningGym("sudokku", 2, 7)


class Tokenizer:
    """A tokenizer whose tokens are characters; its template writes roles before messages."""

    chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    special_tokens_map: Mapping[str, str] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(item) for item in text]

    def get_chat_template(self, _name: None, _tools: Any) -> str:
        return self.chat_template


def encoded(encoder: PromptEncoder, problem: Problem) -> str:
    return "".join(map(chr, encoder.encode(problem) or ()))


def test_questions_are_asked_as_text_or_in_the_chat_template() -> None:
    tokenizer: Any = Tokenizer()
    question = Problem(prompt="1+1", answer="2")
    chat = Problem(
        prompt="",
        answer="2",
        messages=({"role": "system", "content": "own"}, {"role": "user", "content": "1+1"}),
    )

    assert encoded(PromptEncoder(tokenizer, few_shot="0+0=0;"), question) == "0+0=0;1+1"
    asks = PromptEncoder(tokenizer, apply_chat_template=True, system_prompt="brief", few_shot="0+0=0;")
    assert encoded(asks, question) == "<system>brief<user>0+0=0;1+1"
    # The messages of a file have a system message of their own.
    assert encoded(asks, chat) == "<system>own<user>0+0=0;1+1"
    assert PromptEncoder(tokenizer, max_prompt_length=2).encode(question) is None
    with pytest.raises(ConfigError, match="prompts are messages"):
        PromptEncoder(tokenizer).encode(chat)


def test_a_tokenizer_without_chat_template_is_told() -> None:
    tokenizer: Any = Tokenizer()
    tokenizer.chat_template = None

    with pytest.raises(ConfigError, match="no chat template"):
        PromptEncoder(tokenizer, apply_chat_template=True)


@pytest.mark.parametrize(
    ("sizes", "shares", "counts"),
    [
        ([10, 10], [1, 1], [10, 10]),
        ([10, 10], [3, 1], [30, 10]),
        ([90, 10], [1, 1], [90, 90]),
        ([7, 2], [0.7, 0.3], [7, 3]),
    ],
)
def test_a_mixture_has_its_shares_and_every_problem(sizes: list[int], shares: list[float], counts: list[int]) -> None:
    chosen = mixed(range(sum(sizes)), sizes, shares)
    assert set(chosen) == set(range(sum(sizes)))
    parts = [sum(number < sizes[0] for number in chosen), sum(number >= sizes[0] for number in chosen)]
    assert parts == counts
    often = Counter(chosen)
    for numbers in (range(sizes[0]), range(sizes[0], sum(sizes))):
        assert max(often[number] for number in numbers) - min(often[number] for number in numbers) <= 1


def test_a_mixture_leaves_what_is_held_out(tmp_path: Path) -> None:
    for name, count in (("hard", 20), ("easy", 40)):
        rows = [{"prompt": f"{name} {number}", "answer": "1"} for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": weight} for name, weight in (("hard", 2), ("easy", 1))]
    config = LanguageDataConfig.model_validate({"train_data_paths": files})
    train, held = (load_problems(config, evaluation=value) for value in (False, True))
    sources = Counter(train[number].source for number in range(len(train)))
    assert sources == {"hard": 72, "easy": 36}
    held_out = {held[number].prompt for number in range(len(held))}
    assert len(held_out) == 6
    assert held_out.isdisjoint(train[number].prompt for number in range(len(train)))
