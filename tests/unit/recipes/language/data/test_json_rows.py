from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest

from recipes.language.data.problem_sources import read_file
from rlinf_core import ConfigError

ROW = {"prompt": "1 + 1?", "answer": "2"}
TEXT = json.dumps(ROW) + "\n"


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode(),
        TEXT.encode("utf-8-sig"),
        json.dumps([ROW]).encode(),
        json.dumps([ROW], indent=2).encode("utf-8-sig"),
        gzip.compress(TEXT.encode()),
        gzip.compress(json.dumps([ROW]).encode()),
    ],
    ids=["lines", "mark", "list", "marked-list", "gzip", "gzip-list"],
)
def test_encodings_of_others_are_read(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    problems = read_file(str(file), "prompt", "answer")
    assert [(item.prompt, item.answer) for item in (problems[0],)] == [("1 + 1?", "2")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TEXT.encode("utf-16"), "is UTF-16 text, not UTF-8"),
        (TEXT.encode("utf-16-be"), "is UTF-16 text, not UTF-8"),
        (TEXT.encode("utf-32"), "is UTF-32 text, not UTF-8"),
        (gzip.compress(TEXT.encode("utf-32-le")), "is UTF-32 text, not UTF-8"),
        (TEXT.encode() + b"\xff", "not UTF-8 text"),
        (b"\x28\xb5\x2f\xfdrest", "compressed by zstd"),
        (gzip.compress(TEXT.encode())[:-9], "damaged"),
        (b'{"prompt": "a", "answer": NaN}', "holds NaN"),
        (b'[{"prompt": "a"', "the list is not JSON"),
        (b'["a"]', "item 0: the row is not a JSON object"),
    ],
    ids=["utf16", "unmarked", "utf32", "gzip-utf32", "latin", "zstd", "cut", "nan", "open-list", "no-object"],
)
def test_what_cannot_be_read_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_file(str(file), "prompt", "answer")


@pytest.mark.parametrize("number", ["1.10", "6.02e23", "0.1000000000000000000001", "12345678901234567890"])
def test_numbers_keep_what_is_written(number: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"prompt": "a", "answer": {number}}}\n')
    problem = read_file(str(file), "prompt", "answer")[0]
    assert problem.answer == number
    assert str(pickle.loads(pickle.dumps(problem.row["answer"]))) == number
    assert float(problem.row["answer"]) == float(number)


def test_messages_as_json_text_are_messages(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "1 + 1?"}]
    rows = [{"prompt": json.dumps(messages), "answer": "2"}, {"prompt": '[1, "role"]', "answer": "2"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = read_file(str(file), "prompt", "answer")
    assert list(problems[0].messages) == messages
    assert problems[1].prompt == '[1, "role"]'
