"""The process that renders chat templates: nothing that a template does takes more time, memory or text than it may."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from recipes.language.templates.chat_template import ChatTemplate
from recipes.language.templates.template_process import RenderingError, TemplateProcess
from rlinf_core import ConfigError

pytest.importorskip("transformers")

WRITES = "{% for m in messages %}{{ m.content }}{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def asked(template: str, **arguments: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": "1+1", "odd": b"x"}]
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


def test_template_without_an_end_is_ended_at_its_line() -> None:
    process = TemplateProcess(0.1)
    for template, line in ((f"\n\n{LOOPS}", 3), (f"{{{{ lipsum(n=10 ** 9) }}}}{WRITES}", 1)):
        with pytest.raises(RenderingError, match=r"more than 0\.1 s of processor time") as caught:
            process.render(asked(template))
        assert caught.value.line == line
    assert process.render(asked(WRITES)) == "1+1"
    process.close()


def test_call_without_an_end_is_ended_with_its_process() -> None:
    process = TemplateProcess(0.1)
    with pytest.raises(RenderingError, match=r"more than 0\.1 s of processor time"):
        process.render(asked("{{ 10 ** (10 ** 9) }}"))
    assert process.render(asked(WRITES)) == "1+1"
    process.close()


def test_time_of_all_conversations_is_bounded() -> None:
    process = TemplateProcess(0.5)
    slow = asked("{% for a in range(12) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + WRITES)

    def render_all() -> None:
        for _ in range(50):
            process.render(slow)

    with pytest.raises(RenderingError, match="with the conversations before"):
        render_all()
    process.close()


def test_values_reach_a_template_as_they_are(process: TemplateProcess) -> None:
    shown = "{{ tools }} {{ asks }} {{ n + 1 }} {{ text }} {{ messages[0].odd }} {{ add_generation_prompt }}"
    assert process.render(asked(shown, n=2, text="\ud83d é", asks=None)) == "None None 3 \ud83d é <bytes> True"


class Tokenizer:
    """A tokenizer with the template of a folder."""

    special_tokens_map: Mapping[str, str] = {}

    def __init__(self, folder: Path) -> None:
        self.name_or_path = str(folder)
        self.chat_template = (folder / "chat_template.jinja").read_text()

    def get_chat_template(self, _name: None, _tools: Any) -> str:
        return self.chat_template


def test_refusal_names_the_file_and_the_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("\n{{ 'a' * 2000000000 }}" + WRITES)
    tokenizer: Any = Tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="cannot write a user's message") as caught:
        ChatTemplate(tokenizer)
    assert str(caught.value.why) == (
        f"it needs more than 512 MiB of memory (line 2 of `{tmp_path / 'chat_template.jinja'}`)"
    )
