"""Problems of files, formulas and reasoning-gym, and their prompts."""

from __future__ import annotations

import gzip
import json
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from recipes.language.config.problem_config import LanguageDataConfig
from recipes.language.data import problem_sources
from recipes.language.data.problem_sources import (
    Joined,
    ReasoningGym,
    Sums,
    check_file,
    data_set_names,
    load_problems,
    mixed,
    read_file,
)
from recipes.language.data.problems import Problem, PromptEncoder, training_order
from recipes.language.text.chat_template import TemplateRefusalError
from rlinf_core.errors import ConfigError

ROW = {"prompt": "1 + 1?", "answer": "2"}
TEXT = json.dumps(ROW) + "\n"


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
        first, second = sums[index].prompt.removesuffix("=").split("+")
        assert int(first) + int(second) == int(sums[index].answer)
    assert {Sums(1)[index].prompt for index in range(100)} == {f"{a}+{b}=" for a in range(10) for b in range(10)}


Rows = str | bytes | dict[str, Any] | list[dict[str, Any]]
Read = Callable[..., Any]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Writes rows to `some.jsonl`, and reads them as problems."""

    def of(rows: Rows, prompt: str = "prompt", answer: str = "answer") -> Any:
        rows = [rows] if isinstance(rows, dict) else rows
        text = rows if isinstance(rows, str | bytes) else "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "some.jsonl").write_bytes(text.encode() if isinstance(text, str) else text)
        return read_file(str(tmp_path / "some.jsonl"), prompt, answer)

    return of


def test_a_file_has_a_problem_in_each_line(read: Read) -> None:
    rows = [{"q": "1+1", "a": 2, "difficulty": "easy"}, {"q": "2+2", "a": 4, "difficulty": None}]
    text = read("\n".join(map(json.dumps, rows)) + "\n\n", "q", "a")
    problems = [(item.prompt, item.answer, item.difficulty) for item in (text[0], text[1])]
    assert problems == [("1+1", "2", "easy"), ("2+2", "4", "")]
    assert text[0].source == "some"
    assert Joined([text, text])[3].prompt == "2+2"


USER, BEGUN = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is"}
NO_PROMPT, NO_ANSWER = "some.jsonl:1: .*neither a text nor messages", "some.jsonl:1: .*there is no answer"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", "has no rows"),
        ({"prompt": 1}, "some.jsonl:1: there is no key `answer`"),
        (TEXT + '{"prompt": 1,\n', "some.jsonl:2: the line is not JSON"),
        (TEXT + "[" * 200_000 + "\n", "some.jsonl:2: the line is nested more than 100 levels deep"),
        ('{"prompt": 1, "answer": ' + "9" * 5000 + "}\n", ":1: the line holds an integer of too many digits"),
        ('{"prompt": 1, "answer": NaN}\n', "some.jsonl:1: the line holds NaN"),
        ('{"prompt": 1, "answer": 1e999}\n', "some.jsonl:1: the line holds a number that is too large"),
        ('{"prompt": 1, "answer": 2, "answer": 3}\n', "some.jsonl:1: the line names the key 'answer' twice"),
        ('{"prompt": "\\ud800", "answer": 2}\n', "some.jsonl:1: the line holds half of a character"),
        ("[1]\n", "some.jsonl, item 0: the row is not a JSON object"),
        ('[{"prompt": "a"', "the list is not JSON"),
        (TEXT.encode("utf-16"), "is UTF-16 text, not UTF-8"),
        (TEXT.encode("utf-16-be"), "is UTF-16 text, not UTF-8"),
        (TEXT.encode("utf-32"), "is UTF-32 text, not UTF-8"),
        (gzip.compress(TEXT.encode("utf-32-le")), "is UTF-32 text, not UTF-8"),
        (TEXT.encode() + b"\xff", "not UTF-8 text"),
        (b"\x28\xb5\x2f\xfdrest", "compressed by zstd"),
        (b"PAR1\x15\x04\xff", "is a Parquet file"),
        (gzip.compress(TEXT.encode())[:-9], "damaged"),
        ({"prompt": 3, "answer": "2"}, NO_PROMPT),
        ({"prompt": [{"role": "user"}], "answer": "2"}, NO_PROMPT),
        ({"prompt": [], "answer": "2"}, NO_PROMPT),
        ({"prompt": [USER, BEGUN], "answer": "2"}, "some.jsonl:1: the last message under `prompt` is the assistant's"),
        # Messages that a table of texts holds as Python writes them, or cut off.
        ({"prompt": "[{'role': 'user', 'content': 'a'}]", "answer": "2"}, NO_PROMPT),
        ({"prompt": ' [{"role": "user", "content": "a"}', "answer": "2"}, NO_PROMPT),
        ({"prompt": '[{"content": [{"text": "a"}], "role": "user"}]', "answer": "2"}, NO_PROMPT),
        ({"prompt": "1+1", "answer": None}, NO_ANSWER),
        ({"prompt": "1+1", "answer": {"ground_truth": "2"}}, NO_ANSWER),
        ({"prompt": "is it?", "answer": True}, NO_ANSWER),
        ({"prompt": "1+1", "answer": ["2", "two"]}, NO_ANSWER),
        ({"prompt": "", "answer": "2"}, "some.jsonl:1: .*the prompt under `prompt` is empty"),
        ({"prompt": "<image>1+1", "answer": "2", "images": [{"bytes": "iVBO"}]}, ":1: .*there are media in `images`"),
        ({"prompt": "<video>how many?", "answer": "2", "video": "a.mp4"}, ":1: .*there are media in `video`"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_line(read: Read, rows: Rows, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(rows)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(str(tmp_path / "nothing.jsonl"), "q", "a")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(TEXT.encode(), id="lines"),
        pytest.param(TEXT.encode("utf-8-sig"), id="mark"),
        pytest.param(json.dumps([ROW]).encode(), id="list"),
        pytest.param(json.dumps([ROW], indent=2).encode("utf-8-sig"), id="marked-list"),
        pytest.param(gzip.compress(TEXT.encode()), id="gzip"),
        pytest.param(gzip.compress(json.dumps([ROW]).encode()), id="gzip-list"),
    ],
)
def test_encodings_of_others_are_read(content: bytes, read: Read) -> None:
    problem = read(content)[0]
    assert (problem.prompt, problem.answer) == ("1 + 1?", "2")


@pytest.mark.parametrize("number", ["1.10", "6.02e23", "0.1000000000000000000001", "12345678901234567890"])
def test_numbers_keep_what_is_written(number: str, read: Read) -> None:
    problem = read(f'{{"prompt": "a", "answer": {number}}}\n')[0]
    assert problem.answer == number
    assert str(pickle.loads(pickle.dumps(problem.row["answer"]))) == number
    assert float(problem.row["answer"]) == float(number)


def test_messages_as_json_text_are_messages(read: Read) -> None:
    messages = [{"role": "user", "content": "1 + 1?"}]
    texts = read([{"prompt": json.dumps(messages), "answer": "2"}, {"prompt": '[1, "role"]', "answer": "2"}])
    assert list(texts[0].messages) == messages
    assert texts[1].prompt == '[1, "role"]'


def test_list_with_one_answer_is_the_answer(read: Read) -> None:
    assert read({"prompt": "1+1", "answer": [r"\boxed{2}"]})[0].answer == r"\boxed{2}"


def test_a_parquet_file_has_a_problem_in_each_row(tmp_path: Path) -> None:
    file = tmp_path / "some.parquet"
    rows = [{"prompt": f"{n}+{n}", "reward_model": {"ground_truth": str(2 * n)}} for n in (1, 2)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    text = read_file(str(file), "prompt", "reward_model.ground_truth")
    assert [text[index].answer for index in range(2)] == ["2", "4"]
    assert text[1].row == rows[1]
    check_file(str(file), "prompt", "reward_model.ground_truth")
    for change, words in (
        (lambda: None, "row 0: there is no key `answer`"),
        (lambda: parquet.write_table(pyarrow.table({"prompt": [], "answer": []}), file), "has no rows"),
        (lambda: file.write_bytes(b"PAR2"), "not a Parquet file"),
    ):
        change()
        for how in (read_file, check_file):
            with pytest.raises(ConfigError, match=words):
                how(str(file), "prompt", "answer")


def test_numbers_of_few_bits_keep_their_decimal_form(tmp_path: Path) -> None:
    file = tmp_path / "some.parquet"

    def write(*numbers: float) -> None:
        answers = pyarrow.array(numbers, pyarrow.float32())
        parquet.write_table(pyarrow.table({"prompt": ["a"] * len(numbers), "answer": answers}), file)

    write(0.1, 1e-7, 16777216.0, 3.4028234663852886e38, 0.30000001192092896)
    problems = read_file(str(file), "prompt", "answer")
    assert [problems[row].answer for row in range(5)] == ["0.1", "1e-07", "16777216.0", "3.4028235e+38", "0.3"]
    write(float("nan"))
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
        config = LanguageDataConfig(
            type="reasoning_gym", options={"task": "chain_sum", "train_size": 5}, val_size=3, seed=seed
        )
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
    tokenizer.chat_template = tokenizer.chat_template.replace("in messages", "in messages if message.role == 'user'")
    with pytest.raises(TemplateRefusalError, match="omits the text of a `system` message"):
        PromptEncoder(tokenizer, apply_chat_template=True).encode(chat)


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
