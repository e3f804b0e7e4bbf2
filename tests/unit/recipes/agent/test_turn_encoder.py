from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from recipes.agent.conversation.turn_encoder import TurnEncoder
from recipes.agent.conversation.turn_messages import ChatMessage
from recipes.training.huggingface import load_tokenizer
from rlinf_core import ConfigError
from tests.unit.recipes.agent.byte_level import END, write_byte_level

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
    found = TurnEncoder(tokenizer, apply_chat_template=True).encode(context, TOLD)
    assert found == encoded(tokenizer, missing + WRITTEN)


def test_without_a_template_texts_are_told_as_they_are(tokenizer: Any) -> None:
    encoder = TurnEncoder(tokenizer, apply_chat_template=False)
    assert encoder.encode((1, 2), TOLD) == encoded(tokenizer, TOLD[0].text)


def test_a_template_that_changes_what_the_model_said_is_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{% for each in messages %}{{ each['role'] }}{% endfor %}")
    with pytest.raises(ConfigError, match="does not write turns of the model as they are"):
        TurnEncoder(tokenizer, apply_chat_template=True).encode((1, 2), TOLD)
