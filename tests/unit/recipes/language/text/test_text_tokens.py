"""Tokens of parts against those of the whole, over the habits of tokenizers; thoughts between special tokens."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.agent.conversation.turn_messages import ChatMessage, TurnEncoder
from recipes.language import RULES
from recipes.language.data.problems import Problem, PromptEncoder
from recipes.language.rewards.judge import correct, score
from recipes.language.text.text_tokens import THOUGHT_MARKS, Spoken, TextTokens, mended, opens_thought, without_thought
from recipes.sft_chat.conversations import ChatRow
from recipes.sft_chat.examples import ChatExample, ExampleWriter
from rlinf_core import ConfigError
from tests.unit.recipes.language.habits import BUILT, TEMPLATE, tokenizer_of

PAIRS = [("2+2=", "4"), ("question: two and two?", " four"), ("answer:\n", "four"), ("a (", "b)")]
# Where some tokenizers have a token across the border: blanks, words and digits that are divided.
DIVIDED = [
    ("answer: ", "four"),
    ("the ans", "wer"),
    ("12", "345"),
    ("two  ", "  four"),
    ("ca", "fe\N{COMBINING ACUTE ACCENT}"),
]


def example(tokenizer: Any, row: ChatRow, **options: Any) -> ChatExample:
    writer = ExampleWriter(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")], longest=999, **options)
    (made,) = writer.write([row]).examples
    return made


def bare(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text by the library itself."""
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def test_there_are_thirty_habits_or_more() -> None:
    assert len(BUILT) >= 30


@pytest.mark.parametrize("habit", BUILT)
def test_prompt_and_completion_have_the_tokens_of_the_whole(habit: str) -> None:
    tokenizer = tokenizer_of(habit)
    for prompt, completion in PAIRS:
        made = example(tokenizer, ChatRow(place="p", prompt=prompt, completion=completion))
        whole = tokenizer.backend_tokenizer.encode(prompt + completion).ids
        whole += [tokenizer.eos_token_id] * (whole[-1] != tokenizer.eos_token_id)
        assert made.tokens.tolist() == whole, (prompt, completion)
        asked = PromptEncoder(tokenizer, few_shot=prompt[:3]).encode(Problem(prompt=prompt[3:], answer=completion))
        assert tuple(made.tokens[~made.trained].tolist()) == asked
        text = example(tokenizer, ChatRow(place="p", completion=prompt + completion))
        assert text.tokens.tolist() == whole


@pytest.mark.parametrize("habit", ["chars", "chars bos", "chars bos eos", "chars bos sep"])
def test_special_tokens_of_the_texts_are_not_doubled(habit: str) -> None:
    tokenizer = tokenizer_of(habit)
    before, behind = (tokenizer.decode(list(tokens)) for tokens in TextTokens(tokenizer).around)
    plain, marked = (
        [
            example(tokenizer, ChatRow(place="p", prompt=begin + "2+2=", completion="4" + end)).tokens.tolist(),
            example(tokenizer, ChatRow(place="p", completion=begin + "2+2=4" + end)).tokens.tolist(),
            PromptEncoder(tokenizer).encode(Problem(prompt=begin + "2+2=", answer="")),
        ]
        for begin, end in (("", ""), (before, behind))
    )
    assert marked == plain


@pytest.mark.parametrize("habit", BUILT)
def test_prompt_is_the_engine_s_wherever_it_is_divided(habit: str) -> None:
    tokenizer = tokenizer_of(habit)
    for prompt, completion in DIVIDED:
        before, behind = TextTokens(tokenizer).parts([prompt, completion])
        whole = bare(tokenizer, prompt + completion)
        assert before == bare(tokenizer, prompt)
        if whole[: len(before)] == before:
            assert before + behind == whole
        elif "word piece" not in habit and "strip" not in habit and "nf" not in habit:
            # The library's decoder loses blanks within a first token.
            texts = (tokenizer.decode(tokens).replace(" ", "") for tokens in (before + behind, whole))
            assert len(set(texts)) == 1


@pytest.mark.parametrize("habit", BUILT)
def test_messages_have_the_tokens_of_the_rendered_text(habit: str) -> None:
    tokenizer = tokenizer_of(habit)
    texts = [("user", "2+2="), ("assistant", "four "), ("user", " and two?"), ("assistant", "  (b) ")]
    messages = tuple({"role": role, "content": text} for role, text in texts)
    made = example(tokenizer, ChatRow(place="p", messages=messages))
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert made.tokens.tolist() == bare(tokenizer, whole)
    ends = made.tokens == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert made.trained[ends].all()
    # The first prompt is what an engine is asked with; with a system prompt, too.
    problem = Problem(prompt="2+2=", answer="")
    asked = PromptEncoder(tokenizer, apply_chat_template=True).encode(problem)
    first = int(made.trained.nonzero()[0])
    assert tuple(made.tokens[:first].tolist()) == asked
    with_system = PromptEncoder(tokenizer, apply_chat_template=True, system_prompt="brief").encode(problem)
    assert with_system == tuple(
        bare(
            tokenizer, f"<|system|>\nbrief{tokenizer.apply_chat_template(messages[:1], tokenize=False)}<|assistant|>\n"
        )
    )


@pytest.mark.parametrize("habit", BUILT)
def test_conversation_goes_on_without_a_new_beginning(habit: str) -> None:
    tokenizer = tokenizer_of(habit)
    encoder = TurnEncoder(tokenizer, apply_chat_template=False)
    asked = encoder.encode((), [ChatMessage("user", "2+2=")])
    opening = tokenizer.backend_tokenizer.encode("2+2=").ids
    assert [*asked] == opening[: len(opening) - len(TextTokens(tokenizer).around[1])]
    assert encoder.encode(asked, [ChatMessage("tool", "(b)")]) == tuple(
        bare(tokenizer, "=(b)")[len(bare(tokenizer, "=")) :]
    )


def test_half_of_a_character_is_one_clear_error() -> None:
    tokenizer = tokenizer_of("bytes")
    with pytest.raises(ConfigError, match=r"half of a character: 'a\\ud83d'"):
        PromptEncoder(tokenizer).encode(Problem(prompt="a\ud83d", answer=""))
    with pytest.raises(ConfigError, match="half of a character"):
        TextTokens(tokenizer).parts(["a", "\udc00"])
    assert mended("a\ud83db \ud83d\ude00") == "a\ufffdb \U0001f600"


def test_turn_that_the_next_role_ends_is_learned_with_its_mark() -> None:
    tokenizer = tokenizer_of("chars")
    glm = TEMPLATE.replace("<|im_end|>\n", "")
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    made = example_of(tokenizer, glm.replace("{{ m.content }}", "{{ m.content }}" + calls))
    assert made == ["f<|user|>", "four<|user|>"]
    # A call is followed by a result.
    assert example_of(tokenizer, glm.replace("{{ m.content }}", "{{ m.content }}" + calls), most=2) == ["f<sep>"]
    blank = glm.replace(
        "{% endfor %}{% if add",
        "{% if not loop.last and m.role == 'assistant' %}{{ '\\n' }}{% endif %}{% endfor %}{% if add",
    )
    assert example_of(tokenizer, blank, text="four") == ["four\n<|user|>", "four\n<|user|>"]


def example_of(tokenizer: Any, template: str, *, most: int = 4, text: str = "") -> list[str]:
    """Return what is learned of a conversation of a template in which `<|user|>` and `<sep>`, of a tool, end turns."""
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {}}}
    messages = (
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": text, **({} if text else {"tool_calls": [call]})},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "four"},
    )[:most]
    tokenizer.chat_template = template.replace(
        "<|{{ m.role }}|>", "{{ '<sep>' if m.role == 'tool' else '<|' + m.role + '|>' }}"
    )
    try:
        stops = [tokenizer.convert_tokens_to_ids(mark) for mark in ("<eos>", "<|user|>", "<sep>")]
        written = ExampleWriter(tokenizer, stops, longest=999).write([ChatRow(place="p", messages=messages)])
        assert not written.figures["endless"]
        (made,) = written.examples
        pieces: list[list[int]] = [[]]
        for token, trained in zip(made.tokens.tolist(), made.trained.tolist(), strict=True):
            if trained:
                pieces[-1].append(token)
            elif pieces[-1]:
                pieces.append([])
        return [tokenizer.decode(piece) for piece in pieces if piece]
    finally:
        tokenizer.chat_template = TEMPLATE


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
