"""Forms of calls, read off chat templates in the style of well-known families of models."""

# Templates are as long as they are.
# ruff: noqa: E501

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("transformers")

from recipes.agent.call_forms import HERMES, CallForm, find_calls, taught_form
from recipes.language.templates.chat_template import ChatTemplate

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
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert find_calls(text, HERMES, SCHEMAS) == (text, ())


def test_an_answer_in_json_is_no_call_of_a_form_without_marks() -> None:
    form = CallForm("json", "")
    text = 'The answer is {"name": "f", "parameters": {}}'
    assert find_calls(text, form, SCHEMAS) == (text, ())
    assert find_calls('{"name": "f", "parameters": {}} and more', form, SCHEMAS)[1] == ()


def test_a_template_that_knows_no_functions_teaches_no_form() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert taught_form(chat_template(plain)) is None
