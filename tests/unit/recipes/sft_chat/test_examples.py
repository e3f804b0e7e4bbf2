"""Rows of files as conversations, and which tokens of them are learned from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from recipes.sft_chat.chat_actor import row_counts
from recipes.sft_chat.config import ChatDataConfig
from recipes.sft_chat.conversations import ChatRow, load_conversations
from recipes.sft_chat.examples import ChatExample, ExampleSet, ExampleWriter
from rlinf_core import ConfigError
from tests.unit.recipes.sft_chat.chats import PLAIN, THINKING, jsonl, tokenizer, turns


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
        *({"images": []}, {"images": [None], "video": None}, {"image": "the name of a container"}),
        *({"system": text} for text in ("a", " ")),
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
        ({"system": "Be brief.", "text": "a"}, "`system` is no message", "as the first message"),
        (
            {"prompt": "a", "completion": "b", "tools": [{"name": "f"}]},
            "written by a chat template",
            "apply_chat_template",
        ),
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


def test_input_of_alpaca_is_not_left_out(tmp_path: Path) -> None:
    row, keys = (
        {"instruction": "Translate: a", "output": "b"},
        {"prompt_key": "instruction", "completion_key": "output"},
    )
    for text in ("", "a"):
        assert read(tmp_path, {**row, "input": text}, **keys)[0].prompt == "Translate: a"
    with pytest.raises(ConfigError, match=r"`input` is no message"):
        read(tmp_path, {**row, "input": "another"}, **keys)


def test_call_of_a_tool_may_have_no_text(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    (row,) = read(tmp_path, {"messages": [*turns("a"), call]})
    assert row.messages[1]["content"] == ""


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


END = "<eos>"


def written(conversation: ChatRow, template: str | None = PLAIN, **options: Any) -> ExampleSet:
    made = tokenizer(template)
    return ExampleWriter(made, [made.eos_token_id], **{"longest": 1000, **options}).write([conversation])


def chat(*texts: str, **options: Any) -> ChatRow:
    return ChatRow(place="chat.jsonl:7", messages=tuple(turns(*texts)), **options)


def learned(example: ChatExample) -> str:
    """Return the text, the runs of tokens that are learned from in brackets."""
    made, result, before = tokenizer(), "", False
    for token, is_trained in zip(example.tokens.tolist(), example.trained.tolist(), strict=True):
        result += "[" * (is_trained and not before) + "]" * (before and not is_trained) + made.decode([token])
        before = is_trained
    return result + "]" * before


# The runs of tokens that are learned from stand in brackets.
@pytest.mark.parametrize(
    ("row", "template", "options", "expected"),
    [
        pytest.param(
            *(chat("1+1=", "2", "2+2=", "four"), PLAIN, {}),
            "<|user|>1+1=<|assistant|>[2<eos>]<|user|>2+2=<|assistant|>[four<eos>]",
            id="turns of the assistant up to their ends",
        ),
        pytest.param(
            *(chat("1+1=", "3", "2+2=", "four", "3+3=", "5", untrained=(1, 5)), PLAIN, {}),
            "<|user|>1+1=<|assistant|>3<eos><|user|>2+2=<|assistant|>[four<eos>]",
            id="no messages without weight",
        ),
        pytest.param(
            *(chat("hi", "yes"), PLAIN.replace("{{ eos_token }}", "{{ eos_token }}\n"), {}),
            "<|user|>hi<|assistant|>[yes<eos>]\n",
            id="no text behind the end of a turn",
        ),
        pytest.param(
            *(chat("hi", "yes"), PLAIN, {"loss_on": "all"}),
            "<|user|>[hi<|assistant|>yes<eos>]",
            id="all but the first on demand",
        ),
        pytest.param(
            *(chat("a", "b", "c", "d", first=3), PLAIN, {}),
            "<|user|>a<|assistant|>b<eos><|user|>c<|assistant|>[d<eos>]",
            id="no prompt messages of the assistant",
        ),
        pytest.param(ChatRow(place="p", prompt="1+1=", completion="2"), PLAIN, {}, "1+1=[2<eos>]", id="a completion"),
        # Nothing predicts the first token.
        pytest.param(ChatRow(place="p", completion="abc"), PLAIN, {}, "a[bc<eos>]", id="plain text"),
    ],
)
def test_what_is_learned_of_a_row(row: ChatRow, template: str, options: dict[str, Any], expected: str) -> None:
    assert [learned(example) for example in written(row, template, **options).examples] == [expected]


def test_no_weight_and_a_loss_on_all_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="message 1 has `weight: 0`"):
        written(chat("1+1=", "3", "2+2=", "four", untrained=(1,)), loss_on="all")


def test_turns_that_a_template_rewrites_are_own_examples() -> None:
    result = written(chat("a", "<think>x</think>b", "c", "<think>y</think>d"), THINKING)
    assert [learned(example) for example in result.examples] == [
        "<|user|>a<|assistant|>[<think>x</think>b<eos>]",
        "<|user|>a<|assistant|>b<eos><|user|>c<|assistant|>[<think>y</think>d<eos>]",
    ]
    assert row_counts(result)["rows"] == 1
    shorter = written(chat("a", "<think>x</think>b", "c", "<think>y</think>d"), THINKING, longest=10)
    assert row_counts(shorter) == {"rows": 1, "prompts_skipped": 1, "cut_off": 0}


def test_white_space_that_a_template_changes_is_no_lost_text() -> None:
    apart = PLAIN.replace("message['content']", "message['content'].replace('</think>', '</think>\n') | trim")
    result = written(chat("a", " <think>x</think>b "), apart)
    assert [learned(example) for example in result.examples] == ["<|user|>a<|assistant|>[<think>x</think>\nb<eos>]"]


@pytest.mark.parametrize(
    ("row", "template", "options", "words", "why"),
    [
        pytest.param(
            *(chat("hi", "yes#no"), PLAIN.replace("+ message['content']", "+ message['content'].split('#')[0]"), {}),
            *(r"chat\.jsonl:7: the chat template drops text of message 1", ""),
            id="dropped text",
        ),
        pytest.param(
            *(chat("hi", "yes"), PLAIN.replace("{{ '<|assistant|>' }}", "<|assistant|><think>"), {}),
            *("does not write message 1 behind the prompt", "think"),
            id="a prompt that the turn does not continue",
        ),
        pytest.param(chat("hi", "yes"), None, {}, "no chat template", "", id="no template"),
        pytest.param(
            *(chat("a", "b", "c", "d"), "{{ raise_exception('alternate') if messages | length > 2 }}" + PLAIN, {}),
            *(r"chat\.jsonl:7: .*alternate", ""),
            id="refusal of a template",
        ),
        pytest.param(
            *(chat("h" * 50, "yes"), PLAIN, {"longest": 20, "overlong": "truncate"}),
            *("every row has more than 20 tokens", ""),
            id="no learned token left",
        ),
    ],
)
def test_rows_that_cannot_be_written_are_refused(
    row: ChatRow, template: str | None, options: dict[str, Any], words: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        written(row, template, **options)
    assert why in (error.value.why or "")


FUNCTION = {"type": "function", "function": {"name": "add"}}
TALK = PLAIN.replace("in messages %}", "in messages if message.role in ('user', 'assistant') %}")


@pytest.mark.parametrize(
    ("before", "options", "dropped"),
    [
        (
            {"role": "system", "content": "Be brief."},
            {},
            "rejects the messages: it omits the text of a `system` message",
        ),
        ({"role": "tool", "content": "2"}, {}, "rejects the messages: it omits the text of a `tool` message"),
        ({"role": "user", "content": "?"}, {"tools": (FUNCTION,)}, "drops the function `add` of `tools`, at message 2"),
        (
            {"role": "assistant", "content": "", "tool_calls": [FUNCTION]},
            {},
            "drops the function `add` of a call, at message 0",
        ),
    ],
)
def test_what_a_template_drops_around_turns_is_refused(
    before: dict[str, Any], options: dict[str, Any], dropped: str
) -> None:
    row = ChatRow(place="chat.jsonl:7", messages=(before, *turns("hi", "yes")), **options)
    with pytest.raises(ConfigError, match=re.escape(f"chat.jsonl:7: the chat template {dropped}")):
        written(row, TALK)


def test_turn_without_an_end_is_counted() -> None:
    result = written(chat("hi", "yes"), PLAIN.replace("{{ eos_token }}", ""))
    assert learned(result.examples[0]) == "<|user|>hi<|assistant|>[yes]"
    assert result.figures["endless"] == 1


def test_long_rows_are_skipped_and_counted() -> None:
    made = tokenizer()
    rows = [chat("hi", "yes"), chat("hi", "y" * 50)]
    result = ExampleWriter(made, [made.eos_token_id], longest=20).write(rows)
    assert len(result.examples) == 1
    assert result.figures["skipped"] == 1


def test_long_rows_are_truncated_on_demand() -> None:
    result = written(chat("hi", "y" * 50), longest=20, overlong="truncate")
    assert result.lengths == [20]
    assert learned(result.examples[0]) == f"<|user|>hi<|assistant|>[{'y' * 16}]"
    assert result.figures["truncated"] == 1


def test_prompts_are_compared_with_those_of_an_engine() -> None:
    made = tokenizer()
    result = ExampleWriter(made, [made.eos_token_id], longest=100).compare_prompts([chat("a", "b", "c", "d")])
    assert result is not None
    assert result.agrees
    assert result.note == "2 turns of the assistant"


def test_token_across_a_border_is_divided_as_an_engine_gets_it() -> None:
    # Its vocabulary has `>y` as one token, which a whole text has and a prompt with an answer has not.
    merging = tokenizer(PLAIN.replace("<|assistant|>", ">").replace("'<|' + message['role'] + '|>'", "'>'"))
    from recipes.language.models.load_model import built_tokenizer

    made = built_tokenizer(">hiyes", (">y",), merging.chat_template)
    (example,) = ExampleWriter(made, [made.eos_token_id], longest=100).write([chat("hi", "yes")]).examples
    assert made.convert_ids_to_tokens(example.tokens.tolist()) == [">", "h", "i", ">", "y", "e", "s", END]
    assert example.trained.tolist() == [False] * 4 + [True] * 4
