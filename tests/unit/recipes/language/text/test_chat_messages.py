"""Messages of rows and requests: one form of calls and contents, from JSON lines and from Parquet."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet as writer

from recipes.agent.agent_config import AgentDataConfig
from recipes.agent.conversation.turn_messages import ChatMessage
from recipes.agent.tasks_and_tools import first_messages
from recipes.language.data.data_rows import located_rows
from recipes.language.data.problem_sources import read_file
from recipes.language.data.problems import Problem
from recipes.language.text.chat_messages import read_messages, read_tools
from recipes.language.text.chat_template import ChatTemplate
from recipes.sft_chat.config import ChatDataConfig
from recipes.sft_chat.conversations import load_conversations
from recipes.sft_chat.examples import ExampleWriter
from rlinf_core import ConfigError
from tests.unit.recipes.sft_chat.chats import jsonl, tokenizer

ASKED = {"role": "user", "content": "sum?"}
# Functions before the messages, and calls as objects of JSON.
CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}{{ f.name }}{{ f.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def call(arguments: object, name: str = "add") -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: object) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def function(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def parquet(file: Path, rows: Sequence[Any]) -> Path:
    writer.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def learned(file: Path, template: str = CALLS, *, evaluation: bool = False) -> list[str]:
    """Return the texts of the examples that are made of a file."""
    other = jsonl(file.parent / "other.jsonl", [{"messages": [ASKED, {"role": "assistant", "content": "x"}]}])
    paths = {"train_data_paths": [str(file)]}
    if evaluation:
        paths = {"train_data_paths": [str(other)], "val_data_paths": [str(file)]}
    made = tokenizer(template)
    rows = load_conversations(ChatDataConfig.model_validate(paths), evaluation=evaluation)
    examples = ExampleWriter(made, [made.eos_token_id], longest=4096).write(rows).examples
    return [made.decode(example.tokens.tolist()) for example in examples]


@pytest.mark.parametrize(
    "written",
    [
        calling(call('{"a": 1, "b": {"c": null}}')),
        calling(call({"a": 1, "b": {"c": None}})),
        {**calling(), "tool_calls": json.dumps([call('{"a": 1, "b": {"c": null}}')])},
        {**calling(), "tool_calls": [call('{"a": 1, "b": {"c": null}}')["function"]]},
    ],
)
def test_arguments_are_objects_however_they_are_written(tmp_path: Path, written: dict[str, Any]) -> None:
    (text,) = learned(jsonl(tmp_path / "chat.jsonl", [{"messages": [ASKED, written]}]))
    assert text.endswith('<|assistant|>add{"a": 1, "b": {"c": null}}<eos>')


def test_template_that_wants_arguments_as_text_gets_json() -> None:
    # As DeepSeek's, which refuses an object, and as GLM 4's, which would write it as Python does.
    (message,) = read_messages([calling(call('{"a": "b"}'))], "", "messages")
    for part in ("'add' + f.arguments", "f.arguments"):
        template = CALLS.replace("{{ f.name }}{{ f.arguments | tojson }}", f"{{{{ {part} }}}}")
        assert '{"a": "b"}' in ChatTemplate(tokenizer(template)).write([ASKED, message])


DEEP = calling(call({"a": 1, "deep": [{"x": 1}, {"y": {"z": "q"}}]}))
RESULT = {"role": "tool", "content": "3"}
ROWS = [
    {
        "messages": [ASKED, DEEP, ASKED, calling(call({}))],
        "tools": [function("add", a={"type": "integer"}), function("mul", b={"type": "string", "enum": ["u", "v"]})],
        "chat_template_kwargs": None,
    },
    {
        "messages": [{**ASKED, "name": "n"}, calling(call({"a": 2})), RESULT, calling(call({}))],
        "tools": [function("sub", c={"items": {"type": "integer"}})],
        "chat_template_kwargs": None,
    },
]


@pytest.mark.parametrize("evaluation", [False, True])
def test_rows_of_parquet_are_the_tokens_of_their_json_lines(tmp_path: Path, evaluation: bool) -> None:
    lines = learned(jsonl(tmp_path / "chat.jsonl", ROWS), evaluation=evaluation)
    assert learned(parquet(tmp_path / "chat.parquet", ROWS), evaluation=evaluation) == lines
    assert "null" not in "".join(lines)


def test_numbers_and_maps_within_structs_keep_their_form(tmp_path: Path) -> None:
    numbers = pyarrow.list_(
        pyarrow.struct([("x", pyarrow.float32()), ("m", pyarrow.map_(pyarrow.string(), pyarrow.float32()))])
    )
    rows = [[{"x": 0.1, "m": [("k", 0.3)]}], [{"x": None, "m": None}]]
    writer.write_table(pyarrow.table({"a": pyarrow.array(rows, numbers)}), tmp_path / "some.parquet")
    results = [row["a"] for _, row in located_rows(str(tmp_path / "some.parquet"))]
    assert results == [[{"x": 0.1, "m": {"k": 0.3}}], [{"x": None, "m": None}]]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (pyarrow.array([b"a", b"\xed\xa0\x80"]).view(pyarrow.string()), "it is not UTF-8"),
        (pyarrow.array([0, 1], pyarrow.timestamp("ns")), "Nanosecond"),
        (pyarrow.array([0, 10**12], pyarrow.timestamp("s")), "out of range"),
        (pyarrow.array(["1", "NaN"], pyarrow.json_()), "NaN"),
    ],
)
def test_parquet_value_that_cannot_be_read_is_told_by_row(tmp_path: Path, values: pyarrow.Array, why: str) -> None:
    writer.write_table(pyarrow.table({"prompt": ["a", "b"], "x": values}), tmp_path / "some.parquet")
    with pytest.raises(ConfigError, match=rf"some\.parquet, row 1: the value under `x` cannot be read\n.*{why}"):
        located_rows(str(tmp_path / "some.parquet"))


def test_json_of_parquet_is_parsed_at_any_depth(tmp_path: Path) -> None:
    calls = pyarrow.array(['{"a": [1.10]}', None], pyarrow.json_())
    turns = pyarrow.StructArray.from_arrays([pyarrow.array(["tool", "user"]), calls], ["role", "call"])
    listed = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2], pyarrow.int32()), turns)
    table = {"tools": pyarrow.array(['[{"b": 1}]', None], pyarrow.json_()), "turns": listed}
    writer.write_table(pyarrow.table(table), tmp_path / "some.parquet")
    results = [row for _, row in located_rows(str(tmp_path / "some.parquet"))]
    assert results == [
        {"tools": [{"b": 1}], "turns": [{"role": "tool", "call": {"a": [1.1]}}]},
        {"tools": None, "turns": [{"role": "user", "call": None}]},
    ]


def test_prompts_of_parquet_are_those_of_their_json_lines(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "sum"}, {"type": "text", "text": "?"}]
    asked = {"role": "user", "content": parts}
    rows = [
        {"prompt": [asked, calling(call({"a": 1})), asked], "answer": "1"},
        {"prompt": [calling(call({"b": 2})), {**asked, "name": "n"}], "answer": "2"},
    ]
    lines, columns = (
        read_file(str(write(tmp_path / name, rows)), "prompt", "answer")
        for write, name in ((jsonl, "some.jsonl"), (parquet, "some.parquet"))
    )
    for number in range(2):
        assert columns[number].messages == lines[number].messages
    assert lines[0].messages[0] == {"role": "user", "content": "sum?"}
    assert lines[0].prompt == "sum?\n\nsum?"


def test_calls_in_the_prompt_of_a_task_reach_the_agent(tmp_path: Path) -> None:
    result = {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"}
    rows = [{"prompt": [ASKED, calling(call('{"a": 1}')), result], "answer": "1"}]
    problem = read_file(str(jsonl(tmp_path / "some.jsonl", rows)), "prompt", "answer")[0]
    messages = first_messages(problem, AgentDataConfig(apply_chat_template=True), "")
    ((name, arguments, call_id),) = messages[1].calls
    assert (name, json.loads(arguments), call_id) == ("add", {"a": 1}, "1")
    assert messages[2] == ChatMessage("tool", "3", call_id="1", name="add")


def test_instructions_of_tools_join_a_rows_system_message() -> None:
    data = AgentDataConfig(apply_chat_template=True, system_prompt="Be brief.")
    own = ({"role": "system", "content": "Be kind."}, ASKED)
    tasks = [Problem(prompt="?", answer="", messages=messages) for messages in (own, own, (ASKED,))]
    firsts = [
        first_messages(task, data, text)[0].text for task, text in zip(tasks, ("Call.", "", "Call."), strict=True)
    ]
    assert firsts == ["Be kind.\n\nCall.", "Be kind.", "Be brief.\n\nCall."]


def test_functions_may_be_json_texts() -> None:
    described = function("add", a={"type": "integer", "default": None})
    texts = [json.dumps(described), {**described, "function": {**described["function"]}}]
    texts[1]["function"]["parameters"] = json.dumps(described["function"]["parameters"])
    for written in (json.dumps([described, described]), texts):
        assert read_tools(written, "row 3") == (described, described)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([calling(call('{"a": '))], r"row 3: the arguments of the call of `add` in message 0 .*the text is not JSON"),
        ([ASKED, calling(call("[1]"))], r"arguments of the call of `add` in message 1 are not a JSON object"),
        ([calling(call('{"a": "\\ud800"}'))], r"row 3: .*half of a character"),
        ([calling({"function": {"arguments": {}}})], r"row 3: a call in message 0 has no name"),
        ('[{"role": "user", "content": "\\ud800"}]', r"row 3: .*half of a character"),
        ([{"role": "user"}], r"row 3: the content of message 0 is not text"),
    ],
)
def test_messages_that_cannot_be_read_are_told_with_their_place(messages: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_messages(messages, "row 3", "messages")
    assert re.search(words, f"{error.value.message} {error.value.why}")
