"""Thoughts between marks that are special tokens, as rules, judges and reward functions get them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from recipes.language import RULES
from recipes.language.data.prompts import PromptEncoder
from recipes.language.data.text_tokens import THOUGHT_MARKS, Spoken, opens_thought, without_thought
from recipes.language.judging.judge import correct, score
from tests.unit.recipes.language.habits import tokenizer_of


def marked(*marks: str) -> Any:
    """Return a tokenizer to which marks are special tokens."""
    import copy

    tokenizer = copy.deepcopy(tokenizer_of("bytes"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", *marks]})
    return tokenizer


@pytest.mark.parametrize(("begin", "end"), THOUGHT_MARKS)
@pytest.mark.parametrize(
    ("rule", "thought", "said"),
    [
        ("number", "is it 7?", "5"),
        ("number", "1.", "5"),
        ("boxed", r"\boxed{7}", r"\boxed{5}"),
        ("math", "answer is 7", "5"),
        ("number", "<answer>7</answer>", "<answer>5</answer>"),
    ],
)
def test_rules_see_a_thought_by_its_tokens(begin: str, end: str, rule: str, thought: str, said: str) -> None:
    tokenizer = marked(begin, end, "<answer>", "</answer>")
    text = f"{begin}{thought}{end}{said}"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for written in (tokens, tokens[1:]):  # a prompt may open the thought
        decoded = PromptEncoder(tokenizer).text([*written, tokenizer.convert_tokens_to_ids("<|im_end|>")])
        assert decoded in (text, text.removeprefix(begin))
        assert RULES[rule](decoded, r"\boxed{5}" if rule == "boxed" else "5").right == 1.0
        assert RULES[rule](decoded, r"\boxed{7}" if rule == "boxed" else "7").right == 0.0


def test_special_tokens_that_say_nothing_are_left_out() -> None:
    tokenizer = marked("<think>", "</think>")
    text = "<think>a</think><|im_end|>b<eos>"
    assert PromptEncoder(tokenizer).text(tokenizer.encode(text, add_special_tokens=False)) == "<think>a</think>b"
    assert PromptEncoder(tokenizer).text(tokenizer.encode("a<|im_end|>b", add_special_tokens=False)) == "ab"


def test_verdict_within_a_judge_s_thought_is_none() -> None:
    assert correct("<think>Verdict: CORRECT?</think> It is hard.") is None
    assert correct("<think>Verdict: CORRECT?</think> Verdict: INCORRECT") == 0.0
    assert score("[THINK]Score: 9[/THINK]\nno number") is None


def test_calls_stand_outside_of_thoughts() -> None:
    text = "<think>CALL</think>CALL<think>CALL</think>CALL<think>CALL"
    places = [number for number in range(len(text)) if text.startswith("CALL", number)]
    spoken = Spoken(text)
    assert [spoken.has(place, place + 4) for place in places] == [False, True, False, True, False]
    assert not Spoken("CALL", thinking=True).has(0, 4)
    assert opens_thought("<|assistant|>\n<think>\n")
    assert not opens_thought("<think>\n\n</think>\n\n")
    assert without_thought("<think>a</think> ") == "<think>a</think> "
