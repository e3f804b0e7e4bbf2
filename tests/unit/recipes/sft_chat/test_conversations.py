"""Rows of files as conversations, and the refusals of bad rows, `recipes.sft_chat.conversations`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.sft_chat.config import ChatDataConfig
from recipes.sft_chat.conversations import ChatRow, load_conversations
from rlinf_core import ConfigError
from tests.unit.recipes.sft_chat.chats import jsonl, turns


def weighted(text: str, weight: float) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "weight": weight}


def data_of(file: Path, **settings: Any) -> ChatDataConfig:
    return ChatDataConfig.model_validate({"train_data_paths": [str(file)], **settings})


def read(tmp_path: Path, *rows: dict[str, Any], **settings: Any) -> list[ChatRow]:
    file = jsonl(tmp_path / "chat.jsonl", rows)
    return load_conversations(data_of(file, **settings), evaluation=False)


def test_messages_are_read(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"messages": turns("a", "b"), "tools": [{"name": "f"}]})
    assert row.messages == tuple(turns("a", "b"))
    assert row.tools == ({"name": "f"},)
    assert row.place.endswith("chat.jsonl:1")


def test_prompt_and_completion_may_be_messages(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"prompt": turns("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]})
    assert (len(row.messages), row.first) == (4, 3)


def test_weight_of_zero_is_not_trained_on(tmp_path: Path) -> None:
    messages = [*turns("a"), weighted("b", 0), *turns("c"), weighted("d", 1)]
    (row,) = read(tmp_path, {"messages": messages})
    assert row.messages == tuple(turns("a", "b", "c", "d"))
    assert row.untrained == (1,)


@pytest.mark.parametrize(
    "extra",
    [
        {"images": []},
        {"images": [None], "video": None},
        {"image": "the name of a container"},
        {"system": "a"},
        {"system": " "},
    ],
)
def test_columns_that_say_nothing_more_are_passed_over(tmp_path: Path, extra: dict[str, Any]) -> None:
    (row,) = read(tmp_path, {"messages": turns("a", "b"), **extra})
    assert row.messages == tuple(turns("a", "b"))


def test_texts_become_messages_on_demand(tmp_path: Path) -> None:
    row = {"question": "a", "solution": "b"}
    keys = {"prompt_key": "question", "completion_key": "solution"}
    (plain,) = read(tmp_path, row, **keys)
    (chat,) = read(tmp_path, row, **keys, apply_chat_template=True)
    assert (plain.prompt, plain.completion, plain.messages) == ("a", "b", ())
    assert (chat.messages, chat.first) == (tuple(turns("a", "b")), 1)


@pytest.mark.parametrize(
    ("row", "message", "help"),
    [
        ({"conversations": []}, "has neither `messages`", "`from` and `value`"),
        ({"messages": "no list"}, "holds no JSON list", "write a list"),
        ({"messages": []}, "is not a list of messages", "role"),
        ({"messages": [{"from": "human", "value": "a"}]}, "message 0 has no role", "rename `from`"),
        ({"messages": turns("a", " ")}, "message 1, of the assistant, is empty", "remove the row"),
        ({"messages": turns("a")}, "there is no assistant message to train on", "remove the row"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "is not text", "as one text"),
        ({"prompt": "a", "completion": " "}, "the completion is empty", "remove the row"),
        ({"prompt": "a", "completion": turns("b")}, "one of prompt and completion is a text", "both"),
        ({"text": ""}, "the text under `text` is empty", "remove the row"),
        ({"messages": turns("a", "b"), "images": ["a.png"]}, "there are media in `images`", "remove the row"),
        ({"messages": [{**turns("a")[0], "images": [{"path": "a.png"}]}]}, "media in `images`", "remove the row"),
        ({"prompt": "<image>a", "completion": "b", "image": "a.png"}, "media in `image`", "remove the row"),
        ({"system": "Be brief.", "messages": turns("a", "b")}, "`system` is no message", "as the first message"),
        ({"system_prompt": "Be brief.", "prompt": "a", "completion": "b"}, "is no message", "as the first message"),
        ({"messages": turns("a", "b"), "chat_template_kwargs": {"x": 1}}, "has its own", "`data.chat_template_kwargs`"),
        ({"messages": [*turns("a"), weighted("b", 0.5)]}, "`weight` of message 1 is `0.5`", "write 0 or 1"),
        ({"messages": [*turns("a"), weighted("b", 0)]}, "no assistant message to train on", "remove the row"),
        ({"messages": [*turns("a"), {**turns("b")[0], "train": False}]}, "`train: False`", "`weight: 0`"),
    ],
)
def test_bad_row_is_refused_by_file_and_line(tmp_path: Path, row: dict[str, Any], message: str, help: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, {"messages": turns("a", "b")}, row)
    assert "chat.jsonl:2: " in error.value.message
    assert message in error.value.message
    assert help in (error.value.help or "")


def test_call_of_a_tool_may_have_no_text(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    (row,) = read(tmp_path, {"messages": [*turns("a"), call]})
    assert row.messages[1]["content"] == ""


def test_parquet_rows_lose_their_empty_keys(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": [{"role": "user", "content": "a", "name": "n"}, {"role": "assistant", "content": "b"}]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    data = data_of(tmp_path / "chat.parquet")
    (row,) = load_conversations(data, evaluation=False)
    assert row.messages[1] == {"role": "assistant", "content": "b"}


def test_last_rows_are_held_out_on_demand(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "chat.jsonl", [{"messages": turns("a", str(n))} for n in range(5)])
    data = data_of(file, val_size=2)
    parts = [load_conversations(data, evaluation=evaluation) for evaluation in (False, True)]
    assert [[row.messages[1]["content"] for row in part] for part in parts] == [["0", "1", "2"], ["3", "4"]]


def test_more_held_out_rows_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are only 1 rows"):
        read(tmp_path, {"messages": turns("a", "b")}, val_size=1)


def test_generated_conversations_depend_on_seed_and_part_alone() -> None:
    one, other = ChatDataConfig(), ChatDataConfig(seed=1)
    assert load_conversations(one, evaluation=False) == load_conversations(one, evaluation=False)
    assert load_conversations(one, evaluation=False) != load_conversations(other, evaluation=False)
    assert load_conversations(one, evaluation=False)[:5] != load_conversations(one, evaluation=True)[:5]
