from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from recipes.agent.call_forms import HERMES, FunctionCall
from recipes.agent.conversation.agents import AgentTask, tool_agent
from recipes.agent.conversation.chat_model import DrawSettings, LanguageModel
from recipes.agent.conversation.turn_messages import ChatMessage, DrawnTurn, DrawRequest, ToolOffer, TurnEncoder
from recipes.agent.tools.calculator import Calculator
from recipes.agent.tools.toolbox import Toolbox
from recipes.language.templates.chat_template import TemplateRefusalError
from recipes.training.huggingface import load_tokenizer
from rlinf_core import ConfigError
from tests.unit.recipes.agent.conversation.byte_level import END, write_byte_level
from tests.unit.recipes.agent.conversation.test_call_forms import HERMES_TEMPLATE

TOLD = [ChatMessage("tool", "7 <|im_end|> 數")]
WRITTEN = "\n<|im_start|>tool\n7 <|im_end|> 數<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("bytes")
    write_byte_level(folder)
    return load_tokenizer(str(folder / "tokenizer"))


def encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("said", "missing"),
    [
        (f"<result>7{END}", ""),
        ("<result>7", END),
        # What the model said last stands at the beginning of the end as well, and is not the end.
        ("<", END),
        ("7 <|im_end", END),
        ("", END),
    ],
)
def test_what_ends_a_turn_is_told_unless_the_model_said_it(tokenizer: Any, said: str, missing: str) -> None:
    context = (*encoded(tokenizer, "<|im_start|>assistant\n"), *encoded(tokenizer, said))
    result = TurnEncoder(tokenizer, apply_chat_template=True).encode(context, TOLD)
    assert result == encoded(tokenizer, missing + WRITTEN)


def test_without_a_template_texts_are_told_as_they_are(tokenizer: Any) -> None:
    encoder = TurnEncoder(tokenizer, apply_chat_template=False)
    assert encoder.encode((1, 2), TOLD) == encoded(tokenizer, TOLD[0].text)


def test_a_template_that_changes_the_models_words_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for each in messages %}{{ each['content'] if each['role'] != 'assistant' }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(TemplateRefusalError, match="rewrites the model's turns, so"):
        TurnEncoder(tokenizer, apply_chat_template=True).encode((1, 2), TOLD)


STRICT = """{% for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<' + m.role + '>' + m.content + '</>' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.mark.parametrize(
    ("context", "messages"),
    [
        ((1, 2), [ChatMessage("tool", "42")]),
        ((1, 2), [ChatMessage("user", "a"), ChatMessage("user", "b")]),
        ((), [ChatMessage("system", "a"), ChatMessage("user", "b")]),
    ],
)
def test_messages_that_a_template_refuses_are_an_error_of_theirs(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, context: tuple[int, ...], messages: list[ChatMessage]
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", STRICT)
    encoder = TurnEncoder(tokenizer, apply_chat_template=True)
    with pytest.raises(TemplateRefusalError, match=r"not supported|must alternate"):
        encoder.encode(context, messages)
    assert encoder.encode((1, 2), [ChatMessage("user", "a")])


def test_messages_that_a_template_leaves_out_are_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    encoder = TurnEncoder(tokenizer, apply_chat_template=True)
    for context, message in (((1, 2), ChatMessage("tool", "42")), ((), ChatMessage("system", "Be kind."))):
        with pytest.raises(TemplateRefusalError, match=f"omits the text of a `{message.role}` message"):
            encoder.encode(context, [message, ChatMessage("user", "x")])
    assert encoder.encode((1, 2), [ChatMessage("user", "x")]) == encoded(tokenizer, "x")


def test_arguments_of_the_template_reach_it(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if not thinks %}no{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    for thinks, written in ((True, "x"), (False, "xno")):
        encoder = TurnEncoder(tokenizer, apply_chat_template=True, template_arguments={"thinks": thinks})
        assert encoder.encode((), [ChatMessage("user", "x")]) == encoded(tokenizer, written)
    with pytest.raises(ConfigError, match="`thinking`, which the chat template does not read"):
        TurnEncoder(tokenizer, apply_chat_template=True, template_arguments={"thinking": True})


def test_templates_that_read_parts_get_parts(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}{% for part in m.content if part is mapping %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    encoder = TurnEncoder(tokenizer, apply_chat_template=True)
    assert encoder.encode((), [ChatMessage("user", "x")]) == encoded(tokenizer, "x")


FUNCTION = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'
OFFER = ToolOffer((FUNCTION,), "how to call")


def test_functions_are_told_as_the_template_tells_them(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", HERMES_TEMPLATE)
    encoder = TurnEncoder(tokenizer, apply_chat_template=True)
    assert encoder.form == HERMES
    text = encoder.raw_text(encoder.encode((), [ChatMessage("user", "x")], OFFER))
    assert '"name": "add"' in text
    assert "how to call" not in text
    call = ChatMessage("assistant", "", (FunctionCall("add", '{"of": 1}', "c"),))
    context = encoder.encode((), [ChatMessage("user", "x"), call, ChatMessage("tool", "2", call_id="c")], OFFER)
    assert '{"name": "add", "arguments": {"of": 1}}' in encoder.raw_text(context)
    after = encoder.raw_text(encoder.encode((1, 2), [ChatMessage("tool", "2", call_id="c")], OFFER))
    assert "<tool_response>\n2\n</tool_response>" in after
    assert "add" not in after


def test_functions_are_told_in_words_to_other_templates(tokenizer: Any) -> None:
    encoder = TurnEncoder(tokenizer, apply_chat_template=True)
    assert encoder.form is None
    first = encoder.raw_text(encoder.encode((), [ChatMessage("system", "Be kind."), ChatMessage("user", "x")], OFFER))
    assert "system\nBe kind.\n\nhow to call<|im_end|>" in first
    call = ChatMessage("assistant", "so", (FunctionCall("add", '{"of": 1}', "c"),))
    text = encoder.raw_text(encoder.encode((), [ChatMessage("user", "x"), call], OFFER))
    assert 'so<tool_call>{"name": "add", "arguments": {"of": 1}}</tool_call>' in text


class Scripted:
    """Engines that write messages as tokens as a worker does, and say what a test has written."""

    def __init__(self, tokenizer: Any, *turns: str) -> None:
        self._encoder = TurnEncoder(tokenizer, apply_chat_template=True)
        self._tokenizer, self._turns = tokenizer, list(turns)

    async def draw(self, request: DrawRequest) -> DrawnTurn:
        observed = self._encoder.encode(request.context, request.messages, request.tools)
        text = self._turns.pop(0)
        drawn = (*encoded(self._tokenizer, text), self._tokenizer.eos_token_id)
        zeros = (0,) * len(drawn)
        return DrawnTurn(0, observed, drawn, (0.0,) * len(drawn), zeros, text, "stop", text, self._encoder.form)


def test_an_agents_calls_are_in_the_form_of_the_template(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", HERMES_TEMPLATE)
    calls = [
        {"type": "function", "function": {"name": "calculator", "arguments": {"argument": word}}}
        for word in ("2*3", "1/0")
    ]
    arguments = [json.dumps(call["function"]["arguments"]) for call in calls]
    written = "<think>\n\n</think>\n\n" + "".join(
        f'<tool_call>\n{{"name": "calculator", "arguments": {argument}}}\n</tool_call>' for argument in arguments
    )
    settings = DrawSettings(sample=0, seed=0, temperature=1.0, max_turns=4, max_tokens=9999, max_new_tokens=999)
    llm = LanguageModel(Scripted(tokenizer, written, "It is 6."), settings)
    tools = Toolbox([Calculator()], 30.0, native=True)
    task = AgentTask("2*3", (ChatMessage("user", "2*3"),), "6", {})

    outcome = asyncio.run(tool_agent(task, llm, tools))

    assert outcome.answer == "It is 6."
    assert tools.figures["agent/tool_calls"] == 2
    assert tools.figures["agent/tool_errors"] == 1
    (segment,) = llm.segments()
    functions = list(tools.functions)
    conversation = [
        {"role": "user", "content": "2*3"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "6"},
        {"role": "tool", "content": "error: division by zero"},
        {"role": "assistant", "content": "It is 6."},
    ]
    # Token by token what the template writes of the whole conversation.
    whole = tokenizer.apply_chat_template(conversation, tools=functions, tokenize=False).removesuffix("\n")
    assert tokenizer.decode((*segment.prompt, *segment.tokens)) == whole
    assert (*segment.prompt, *segment.tokens) == encoded(tokenizer, whole)


def test_an_agents_calls_are_plain_where_the_template_knows_none(tokenizer: Any) -> None:
    settings = DrawSettings(sample=0, seed=0, temperature=1.0, max_turns=4, max_tokens=9999, max_new_tokens=999)
    llm = LanguageModel(Scripted(tokenizer, "<calculator>2*3</calculator>", "6"), settings)
    task = AgentTask("2*3", (ChatMessage("user", "2*3"),), "6", {})
    assert asyncio.run(tool_agent(task, llm, Toolbox([Calculator()], 30.0, native=True))).answer == "6"
    text = tokenizer.decode((*llm.segments()[0].prompt, *llm.segments()[0].tokens))
    assert "You may use tools" in text
    assert "tool\n<result>6</result>" in text
