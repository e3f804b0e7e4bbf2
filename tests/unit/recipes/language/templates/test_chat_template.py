"""Chat templates as they come: what they write before the model's turn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from recipes.language.rules.template_rules import require_conversations
from recipes.language.templates.chat_template import ChatTemplate
from rlinf_core import ConfigError
from rlinf_core.job.load import load_job

pytest.importorskip("jinja2")

HEAD = "<|im_start|>assistant\n"
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}" + HEAD + "{% endif %}"
# As Qwen3's: thoughts stand before the words, and marks of thoughts are no special tokens.
THINKS = TURNS.replace("{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n</think>{% endif %}{{ m.content }}")


class Tokenizer:
    """What `ChatTemplate` uses of a tokenizer."""

    all_special_tokens = ("<|im_start|>", "<|im_end|>")
    special_tokens_map: Mapping[str, str] = {"eos_token": "<|im_end|>"}

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def get_chat_template(self, _name: None, _tools: Any) -> str:
        return self.chat_template


def made(template: str) -> ChatTemplate:
    tokenizer: Any = Tokenizer(template)
    return ChatTemplate(tokenizer)


@pytest.mark.parametrize(
    ("template", "missing"),
    [
        (TURNS + PROMPT, None),
        (TURNS + HEAD, None),
        (TURNS, HEAD),
        (THINKS + PROMPT, None),
        ("{% for m in messages %}{{ '[INST]' + m.content if m.role == 'user' else m.content }}{% endfor %}", None),
        (TURNS + PROMPT.replace(HEAD, HEAD + "<think>\n"), None),
    ],
    ids=["asked", "always", "never", "thinks", "none needed", "thinks first"],
)
def test_missing_prompt_is_named(template: str, missing: str | None) -> None:
    assert made(template).missing_prompt() == missing


def test_prompt_that_is_written_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="writes the beginning of the model's turn twice") as caught:
        made(TURNS + PROMPT + PROMPT)
    assert "assistant" in str(caught.value.why)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}{{ m.content }", "unexpected '}'"),
        ("{{ messages | nosuch }}", "No filter named 'nosuch'"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        ("{{ raise_exception('no') }}", "no (line 1 of the template)"),
        ("hello", "does not contain the text of the `user` message"),
    ],
)
def test_template_that_cannot_write_is_refused_with_its_reason(template: str, why: str) -> None:
    with pytest.raises(ConfigError, match="cannot write a user's message") as caught:
        made(template)
    assert why in str(caught.value.why)


def test_missing_prompt_is_among_the_comparisons_of_a_run() -> None:
    config: Any = load_job("math_laptop", ["data.apply_chat_template=true"], environ={}).config
    good, lacking = (require_conversations(config, made(template)) for template in (TURNS + PROMPT, TURNS))
    assert good is not None
    assert lacking is not None
    assert (good.agrees, lacking.agrees) == (True, False)
    assert "prompts do not end with '<|im_start|>assistant" in lacking.note


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
NO_TOOL = PLAIN.replace("{{", "{% if m.role == 'tool' %}{{ raise_exception('x') }}{% endif %}{{")
NO_ASSISTANT = "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
BRIEF = "data.system_prompt=Be brief."


@pytest.mark.parametrize(
    ("recipe", "template", "settings", "where", "why"),
    [
        ("math_laptop", PLAIN, [BRIEF], None, ""),
        ("math_laptop", NO_SYSTEM, [], None, ""),
        ("math_laptop", NO_SYSTEM, [BRIEF], "data.system_prompt", "no system"),
        (
            "math_laptop",
            PLAIN.replace("m.content", "m.content if m.role == 'user'"),
            [BRIEF],
            "data.system_prompt",
            "text of the `system` message",
        ),
        ("agent_calculator", PLAIN, [], None, ""),
        ("agent_calculator", NO_SYSTEM, [], "", "a conversation of system, user"),
        ("agent_calculator", NO_SYSTEM, ["agent.tools=[]"], None, ""),
        ("agent_calculator", NO_ASSISTANT, ["agent.tools=[]"], "", "text of the `assistant` message"),
        ("agent_calculator", NO_TOOL, [], "", "assistant, tool"),
    ],
)
def test_conversations_of_a_job_are_written_by_its_template(
    recipe: str, template: str, settings: list[str], where: str | None, why: str
) -> None:
    config: Any = load_job(recipe, ["data.apply_chat_template=true", *settings], environ={}).config
    if where is None:
        assert require_conversations(config, made(template)) is not None
        return
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        require_conversations(config, made(template))
    assert where in str(caught.value.where)
