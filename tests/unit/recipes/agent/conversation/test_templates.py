"""Forms of calls, read off chat templates in the style of well-known families of models; and turns as tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recipes.agent.conversation.agents import AgentTask, tool_agent
from recipes.agent.conversation.call_forms import HERMES, CallForm, FunctionCall, find_calls, taught_form
from recipes.agent.conversation.chat_model import DrawSettings, LanguageModel
from recipes.agent.conversation.turn_messages import ChatMessage, DrawnTurn, DrawRequest, ToolOffer, TurnEncoder
from recipes.agent.tools.computing_tools import Calculator
from recipes.agent.tools.tool import Toolbox
from recipes.language.text.chat_template import ChatTemplate, TemplateRefusalError
from recipes.training.huggingface import load_tokenizer
from rlinf_core import ConfigError
from tests.unit.recipes.agent.conversation.byte_level import END, write_byte_level

# Templates are as long as they are.
# ruff: noqa: E501


HERMES_TEMPLATE = """{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
use <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}<|im_start|>assistant
<think>

</think>

{{ message.content }}
{%- for tool_call in message.tool_calls %}
{%- set tool_call = tool_call.function %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{{ bos_token }}{%- for message in messages %}{%- if not ('tool_calls' in message) %}{{- '<|start_header_id|>' + ('ipython' if message.role=='tool' else message['role']) + '<|end_header_id|>\n\n' }}{% if loop.first and tools %}{% for t in tools %}{{ t | tojson(indent=4) }}

{% endfor %}{% endif %}{{ message['content'] | trim + '<|eot_id|>' }}{%- else %}{%- if not message.tool_calls|length == 1 %}{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}{%- set tool_call = message.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}{% endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role=='user' %}{% if tools %}[AVAILABLE_TOOLS] {{ tools|tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.role=='tool' %}[TOOL_RESULTS] {"content": "{{ m.content }}", "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id|length != 9 %}{{ raise_exception('nine') }}{% endif %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}, "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"""
MISTRAL2 = (
    MISTRAL.replace("[TOOL_CALLS] [", "")
    .replace(
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}, "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}',
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments|tojson }}",
    )
    .replace("]</s>", "</s>")
)
DEEP = """{{ bos_token }}{% for m in messages %}{% if m.role=='user' %}{% if tools %}{{ tools|tojson }}{% endif %}<｜User｜>{{ m.content }}{% elif m.role=='tool' %}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% elif m.tool_calls %}<｜Assistant｜>{% for c in m.tool_calls %}{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n{{ c.function.arguments|tojson }}\n```<｜tool▁call▁end｜>{% if not loop.last %}\n{% else %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}{% else %}<｜Assistant｜>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"""
CODER = HERMES_TEMPLATE.replace(
    """{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}""",
    """<function={{ tool_call.name }}>
{%- for k, v in tool_call.arguments|items %}
<parameter={{ k }}>
{{ v }}
</parameter>
{%- endfor %}
</function>""",
)
GLM = HERMES_TEMPLATE.replace(
    """
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>""",
    """
<tool_call>{{ tool_call.name }}
{% for k, v in tool_call.arguments|items %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v }}</arg_value>
{% endfor %}</tool_call>""",
)
KIMI = DEEP.replace(
    "function<｜tool▁sep｜>{{ c.function.name }}\n```json\n",
    "functions.{{ c.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>",
).replace("\n```", "")


SCHEMAS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    "g": {},
}
# By family: its template, a turn with a call of f and often one of g, and how many calls there are.
FAMILIES = {
    "hermes": (
        HERMES_TEMPLATE,
        'hm <tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "12"}}\n</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        2,
    ),
    "llama": (LLAMA, '{"name": "f", "parameters": {"a": 1, "b": "12"}}', 1),
    "python_tag": (
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {"a": 1, "b": "12"}}; {"name": "g", "parameters": {}}',
        2,
    ),
    "mistral_list": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1, "b": "12"}, "id": "x"}, {"name": "g", "arguments": {}}]',
        2,
    ),
    "mistral_args": (MISTRAL2, '[TOOL_CALLS]f[ARGS]{"a": 1, "b": "12"}[TOOL_CALLS]g[ARGS]{}', 2),
    "deepseek": (
        DEEP,
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1, "b": "12"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        2,
    ),
    "qwen_coder": (
        CODER,
        "so\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n12\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        2,
    ),
    "glm": (
        GLM,
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
        1,
    ),
    "kimi": (
        KIMI,
        '<｜tool▁call▁begin｜>functions.f:3<|tool_call_argument_begin|>{"a": 1, "b": "12"}<｜tool▁call▁end｜>',
        1,
    ),
}


class Renders:
    """A tokenizer as far as its chat template goes."""

    special_tokens_map: Mapping[str, str] = {"bos_token": "<s>", "eos_token": "</s>"}

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def get_chat_template(self, _name: None, _tools: Any) -> str:
        return self.chat_template


def chat_template(text: str) -> ChatTemplate:
    tokenizer: Any = Renders(text)
    return ChatTemplate(tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_of_a_family_is_read_off_its_template(family: str) -> None:
    template, text, count = FAMILIES[family]
    form = taught_form(chat_template(template))
    assert form is not None
    _, calls = find_calls(text, form, SCHEMAS)
    assert [call.name for call in calls] == ["f", "g"][:count]
    assert [json.loads(call.arguments) for call in calls] == [{"a": 1, "b": "12"}, {}][:count]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_the_template_writes_is_read_back(family: str) -> None:
    template = chat_template(FAMILIES[family][0])
    form = taught_form(template)
    assert form is not None
    asked = [{"role": "user", "content": "?"}]
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"a": 5, "b": "c d"}}}
    whole = template.render([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}], [call])
    turn = whole[len(template.render(asked, [call])) :]
    ((name, arguments, _),) = find_calls(turn, form, SCHEMAS)[1]
    assert (name, json.loads(arguments)) == ("f", {"a": 5, "b": "c d"})


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": </tool_call>',
        "<tool_call>" + "[" * 100_000,
        '<tool_call>{"name": ["f"], "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{} and more"}</tool_call>',
        f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 200}{"]" * 200}}}}}</tool_call>',
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert find_calls(text, HERMES, SCHEMAS) == (text, ())


OPTIONAL: Any = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "null", "null"),
        (OPTIONAL, "12", "12"),
        (OPTIONAL, "null", None),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": "integer"}, "12", 12),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "array"}, "", ""),
        (True, "[1]", [1]),
    ],
)
def test_values_of_pairs_have_the_types_of_their_schema(schema: Any, text: str, value: Any) -> None:
    form = taught_form(chat_template(GLM))
    assert form is not None
    written = f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    ((_, arguments, _),) = find_calls(written, form, {"f": {"properties": {"x": schema}}})[1]
    assert json.loads(arguments) == {"x": value}


def test_an_answer_in_json_is_no_call_of_a_form_without_marks() -> None:
    form = CallForm("json", "")
    text = 'The answer is {"name": "f", "parameters": {}}'
    assert find_calls(text, form, SCHEMAS) == (text, ())
    assert find_calls('{"name": "f", "parameters": {}} and more', form, SCHEMAS)[1] == ()


def test_a_template_that_knows_no_functions_teaches_no_form() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert taught_form(chat_template(plain)) is None


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
