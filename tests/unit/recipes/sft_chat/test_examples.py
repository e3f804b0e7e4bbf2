"""Which tokens of a conversation are learned from, `recipes.sft_chat.examples`."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.sft_chat.conversations import ChatRow
from recipes.sft_chat.examples import ChatExample, ExampleSet, ExampleWriter
from rlinf_core import ConfigError
from tests.unit.recipes.sft_chat.chats import PLAIN, THINKING, tokenizer, turns

END = "<eos>"


def written(conversation: ChatRow, template: str | None = PLAIN, **options: Any) -> ExampleSet:
    made = tokenizer(template)
    return ExampleWriter(made, [made.eos_token_id], **{"longest": 1000, **options}).write([conversation])


def chat(*texts: str, **options: Any) -> ChatRow:
    return ChatRow(place="chat.jsonl:7", messages=tuple(turns(*texts)), **options)


def text(example: ChatExample, *, trained: bool = False) -> str:
    tokens = example.tokens[example.trained] if trained else example.tokens
    return tokenizer().decode(tokens.tolist())


def learned(example: ChatExample) -> list[str]:
    """Return the runs of tokens that are learned from."""
    runs: list[list[int]] = []
    before = False
    for token, is_trained in zip(example.tokens.tolist(), example.trained.tolist(), strict=True):
        if is_trained:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = is_trained
    return [tokenizer().decode(run) for run in runs]


def test_turns_of_the_assistant_are_learned_up_to_their_end() -> None:
    (example,) = written(chat("1+1=", "2", "2+2=", "four")).examples
    assert text(example) == f"<|user|>1+1=<|assistant|>2{END}<|user|>2+2=<|assistant|>four{END}"
    assert learned(example) == [f"2{END}", f"four{END}"]


def test_messages_without_weight_are_not_learned() -> None:
    (example,) = written(chat("1+1=", "3", "2+2=", "four", "3+3=", "5", untrained=(1, 5))).examples
    assert text(example) == f"<|user|>1+1=<|assistant|>3{END}<|user|>2+2=<|assistant|>four{END}"
    assert learned(example) == [f"four{END}"]
    with pytest.raises(ConfigError, match="message 1 has `weight: 0`"):
        written(chat("1+1=", "3", "2+2=", "four", untrained=(1,)), loss_on="all")


def test_text_behind_the_end_of_a_turn_is_not_learned() -> None:
    (example,) = written(chat("hi", "yes"), PLAIN.replace("{{ eos_token }}", "{{ eos_token }}\n")).examples
    assert text(example) == f"<|user|>hi<|assistant|>yes{END}\n"
    assert learned(example) == [f"yes{END}"]


def test_all_tokens_but_the_first_are_learned_on_demand() -> None:
    (example,) = written(chat("hi", "yes"), loss_on="all").examples
    assert learned(example) == [f"hi<|assistant|>yes{END}"]


def test_prompt_messages_of_the_assistant_are_not_learned() -> None:
    (example,) = written(chat("a", "b", "c", "d", first=3)).examples
    assert learned(example) == [f"d{END}"]


def test_turns_that_a_template_rewrites_are_own_examples() -> None:
    result = written(chat("a", "<think>x</think>b", "c", "<think>y</think>d"), THINKING)
    assert [text(example) for example in result.examples] == [
        f"<|user|>a<|assistant|><think>x</think>b{END}",
        f"<|user|>a<|assistant|>b{END}<|user|>c<|assistant|><think>y</think>d{END}",
    ]
    assert [learned(example) for example in result.examples] == [
        [f"<think>x</think>b{END}"],
        [f"<think>y</think>d{END}"],
    ]
    assert result.figures["split"] == 1


def test_dropped_turn_is_refused_by_its_row() -> None:
    dropping = PLAIN.replace("+ message['content']", "+ message['content'].split('#')[0]")
    with pytest.raises(ConfigError, match=r"chat\.jsonl:7: the chat template drops text of message 1"):
        written(chat("hi", "yes#no"), dropping)


def test_prompt_that_the_turn_does_not_continue_is_refused() -> None:
    opening = PLAIN.replace("{{ '<|assistant|>' }}", "<|assistant|><think>")
    with pytest.raises(ConfigError, match="does not write message 1 behind the prompt") as error:
        written(chat("hi", "yes"), opening)
    assert error.value.why is not None
    assert "think" in error.value.why


def test_missing_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        written(chat("hi", "yes"), None)


def test_refusal_of_a_template_names_the_row() -> None:
    strict = "{{ raise_exception('roles must alternate') if messages | length > 2 }}" + PLAIN
    with pytest.raises(ConfigError, match=r"chat\.jsonl:7: .*roles must alternate"):
        written(chat("a", "b", "c", "d"), strict)


def test_turn_without_an_end_is_counted() -> None:
    result = written(chat("hi", "yes"), PLAIN.replace("{{ eos_token }}", ""))
    assert learned(result.examples[0]) == ["yes"]
    assert result.figures["endless"] == 1


def test_completion_is_learned_behind_its_prompt() -> None:
    (example,) = written(ChatRow(place="p", prompt="1+1=", completion="2")).examples
    assert text(example) == f"1+1=2{END}"
    assert learned(example) == [f"2{END}"]


def test_plain_text_is_learned_whole() -> None:
    (example,) = written(ChatRow(place="p", completion="abc")).examples
    assert learned(example) == [f"bc{END}"]  # nothing predicts the first token


def test_long_rows_are_skipped_and_counted() -> None:
    made = tokenizer()
    rows = [chat("hi", "yes"), chat("hi", "y" * 50)]
    result = ExampleWriter(made, [made.eos_token_id], longest=20).write(rows)
    assert len(result.examples) == 1
    assert result.figures["skipped"] == 1


def test_long_rows_are_truncated_on_demand() -> None:
    result = written(chat("hi", "y" * 50), longest=20, overlong="truncate")
    assert result.lengths == [20]
    assert learned(result.examples[0]) == ["y" * 16]
    assert result.figures["truncated"] == 1


def test_rows_without_a_learned_token_left_are_refused() -> None:
    with pytest.raises(ConfigError, match="every row has more than 20 tokens"):
        written(chat("h" * 50, "yes"), longest=20, overlong="truncate")


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
