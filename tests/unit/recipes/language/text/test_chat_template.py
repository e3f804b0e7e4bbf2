"""Chat templates as they come, and the bounded process that renders them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from recipes.language.rules.model_rules import require_conversations
from recipes.language.text.chat_template import ChatTemplate
from recipes.language.text.template_process import RenderingError, TemplateProcess
from rlinf_core import ConfigError
from tests.unit.recipes.language.tiny import job_config

HEAD = "<|im_start|>assistant\n"
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}" + HEAD + "{% endif %}"
# As Qwen3's: thoughts stand before the words, and marks of thoughts are no special tokens.
THINKS = TURNS.replace("{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n</think>{% endif %}{{ m.content }}")


class Tokenizer:
    """What `ChatTemplate` uses of a tokenizer."""

    all_special_tokens = ("<|im_start|>", "<|im_end|>")
    special_tokens_map: Mapping[str, str] = {"eos_token": "<|im_end|>"}

    def __init__(self, template: str, folder: str = "") -> None:
        self.chat_template, self.name_or_path = template, folder

    def get_chat_template(self, _name: None, _tools: Any) -> str:
        return self.chat_template


def made(template: str, folder: str = "") -> ChatTemplate:
    tokenizer: Any = Tokenizer(template, folder)
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


@pytest.mark.parametrize("value", [date(2026, 3, 14), Decimal("1.50"), b"x"])
@pytest.mark.parametrize("form", ["", "{{ m.tool_calls[0].function.arguments + '' if m.tool_calls }}"])
def test_value_that_json_lacks_is_refused(value: object, form: str) -> None:
    call = {"name": "book", "arguments": {"when": value}}
    calling = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    with pytest.raises(ConfigError, match=f"a value is a `{type(value).__name__}`, which JSON does not have"):
        made(TURNS.replace("<|im_end|>", f"{form}<|im_end|>") + PROMPT).write(
            [{"role": "user", "content": "x"}, calling]
        )


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
    config = job_config("data.apply_chat_template=true", sound=False)
    good, lacking = (require_conversations(config, made(template)) for template in (TURNS + PROMPT, TURNS))
    assert good is not None
    assert lacking is not None
    assert (good.agrees, lacking.agrees) == (True, False)
    assert "prompts do not end with '<|im_start|>assistant" in lacking.note


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
NO_TOOL = PLAIN.replace("{{", "{% if m.role == 'tool' %}{{ raise_exception('x') }}{% endif %}{{")
NO_ASSISTANT = "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
USER_ALONE = PLAIN.replace("m.content", "m.content if m.role == 'user'")
BRIEF = "data.system_prompt=Be brief."


@pytest.mark.parametrize(
    ("recipe", "template", "settings", "where", "why"),
    [
        ("math/sums-laptop", PLAIN, [BRIEF], None, ""),
        ("math/sums-laptop", NO_SYSTEM, [], None, ""),
        ("math/sums-laptop", NO_SYSTEM, [BRIEF], "data.system_prompt", "no system"),
        ("math/sums-laptop", USER_ALONE, [BRIEF], "data.system_prompt", "text of the `system` message"),
        ("agent/calculator-laptop", PLAIN, [], None, ""),
        ("agent/calculator-laptop", NO_SYSTEM, [], "", "a conversation of system, user"),
        ("agent/calculator-laptop", NO_SYSTEM, ["agent.tools=[]"], None, ""),
        ("agent/calculator-laptop", NO_ASSISTANT, ["agent.tools=[]"], "", "text of the `assistant` message"),
        ("agent/calculator-laptop", NO_TOOL, [], "", "assistant, tool"),
    ],
)
def test_conversations_of_a_job_are_written_by_its_template(
    recipe: str, template: str, settings: list[str], where: str | None, why: str
) -> None:
    config = job_config("data.apply_chat_template=true", *settings, file=recipe, sound=False)
    if where is None:
        assert require_conversations(config, made(template)) is not None
        return
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        require_conversations(config, made(template))
    assert where in str(caught.value.where)


WRITES = "{% for m in messages %}{{ m.content }}{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def asked(template: str, **arguments: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": "1+1"}]
    return {"template": template, "messages": messages, "tools": None, "asks": True, "arguments": arguments}


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(1.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("template", "reason", "line"),
    [
        ("\n{{ 'a' * 2000000000 }}", "needs more than 512 MiB", 2),
        ("{{ '%1000000000d' % 1 }}", "needs more than 512 MiB", 1),
        ("{{ messages[0].content | center(2000000000) }}", "needs more than 512 MiB", 1),
        ("{{ [0] * 10 ** 10 }}", "needs more than 512 MiB", 1),
        ("{{ (1).to_bytes(10 ** 10, 'big') }}", "needs more than 512 MiB", 1),
        ("{% macro f() %}{{ f() }}{% endmacro %}\n\n{{ f() }}", "recursion", 1),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion", None),
        ("{{ 'a' * 2000000 }}", "writes 2000000 characters", None),
        ("\n{{ raise_exception('a' * 100000) }}", "a" * 297 + "...", 2),
        ("{{ ''.__class__.__base__ }}", "unsafe", 1),
        ("{{ 1 }", "unexpected '}'", 1),
    ],
)
def test_template_that_exceeds_a_bound_is_refused_at_its_line(
    process: TemplateProcess, template: str, reason: str, line: int | None
) -> None:
    with pytest.raises(RenderingError) as caught:
        process.render(asked(template))
    assert reason in caught.value.reason
    assert caught.value.line == line
    assert len(caught.value.reason) <= 300
    # The process goes on, or another one does.
    assert process.render(asked(WRITES)) == "1+1"


@pytest.mark.parametrize(
    ("template", "line"),
    [(f"\n\n{LOOPS}", 3), (f"{{{{ lipsum(n=10 ** 9) }}}}{WRITES}", 1), ("{{ 10 ** (10 ** 9) }}", None)],
    ids=["loops", "calls", "one call, with its process"],
)
def test_template_without_an_end_is_ended_at_its_line(template: str, line: int | None) -> None:
    process = TemplateProcess(0.1)
    with pytest.raises(RenderingError, match=r"more than 0\.1 s of processor time") as caught:
        process.render(asked(template))
    assert line in (caught.value.line, None)
    assert process.render(asked(WRITES)) == "1+1"
    process.close()


def test_time_of_all_conversations_is_bounded() -> None:
    process = TemplateProcess(1.0)
    # A tenth of a second or so: far from the bound by itself, and far from what each conversation adds to it.
    slow = asked("{% for a in range(40) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + WRITES)
    process.render(slow)

    def render_all() -> None:
        for _ in range(200):
            process.render(slow)

    with pytest.raises(RenderingError, match="with the conversations before"):
        render_all()
    process.close()


def test_values_reach_a_template_as_they_are(process: TemplateProcess) -> None:
    shown = "{{ tools }} {{ asks }} {{ n + 1 }} {{ text }} {{ add_generation_prompt }}"
    assert process.render(asked(shown, n=2, text="\ud83d é", asks=None)) == "None None 3 \ud83d é True"


def test_refusal_names_the_file_and_the_line(tmp_path: Path) -> None:
    file, text = tmp_path / "chat_template.jinja", "\n{{ 'a' * 2000000000 }}" + WRITES
    file.write_text(text)
    with pytest.raises(ConfigError, match="cannot write a user's message") as caught:
        made(text, str(tmp_path))
    assert str(caught.value.why) == f"it needs more than 512 MiB of memory (line 2 of `{file}`)"
