from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from recipes.language.data.problems import Problem
from recipes.language.data.prompts import PromptEncoder
from recipes.language.models.load_model import (
    built_model,
    built_tokenizer,
    check_vocabulary,
    load_model,
    stop_token_ids,
)
from recipes.training.huggingface import load_tokenizer
from rlinf_core.errors import ConfigError


def saved(folder: Path) -> tuple[Any, Any]:
    tokenizer = built_tokenizer()
    model = built_model(tokenizer, hidden_dim=32, layers=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return tokenizer, model


def test_a_built_model_comes_back_from_its_folder(tmp_path: Path) -> None:
    tokenizer, model = saved(tmp_path / "model")

    again, loaded = load_tokenizer(str(tmp_path / "model")), load_model(str(tmp_path / "model"))

    assert again.encode("12+3=") == tokenizer.encode("12+3=")
    assert tokenizer.decode([*tokenizer.encode("1 + 2"), tokenizer.eos_token_id], skip_special_tokens=True) == "1 + 2"
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert stop_token_ids(again, str(tmp_path / "model")) == (tokenizer.eos_token_id,)


def test_weights_depend_on_the_seed_alone() -> None:
    tokenizer = built_tokenizer()
    torch.manual_seed(5)
    first = built_model(tokenizer, hidden_dim=32, layers=1, seed=1)
    second = built_model(tokenizer, hidden_dim=32, layers=1, seed=1)

    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_missing_in_a_folder_is_told(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    empty = tmp_path / "empty"
    empty.mkdir()

    with pytest.raises(ConfigError, match="does not exist"):
        load_model(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="has no weights"):
        load_model(str(tmp_path / "model"))
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(str(empty))
    shutil.copytree(tmp_path / "model", tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(str(tmp_path / "broken"))


def test_a_tokenizer_of_another_model_is_refused() -> None:
    model = built_model(built_tokenizer("01"), hidden_dim=32, layers=1)

    with pytest.raises(ConfigError, match="the tokenizer has"):
        check_vocabulary(model, built_tokenizer())


def test_a_question_is_written_as_the_model_expects_it() -> None:
    tokenizer: Any = built_tokenizer("0123456789+=ab")

    plain = PromptEncoder(tokenizer, few_shot="1+1=2", max_prompt_length=12)
    assert tokenizer.decode(plain.encode(Problem(prompt="3+4=", answer=""))) == "1+1=23+4="
    assert plain.encode(Problem(prompt="123456789", answer="")) is None
    with pytest.raises(ConfigError, match="no chat template"):
        PromptEncoder(tokenizer, apply_chat_template=True)
    with pytest.raises(ConfigError, match="system_prompt"):
        PromptEncoder(tokenizer, system_prompt="a")
    tokenizer.chat_template = "{% for m in messages %}a{{ m['content'] }}{% endfor %}b"
    chat = PromptEncoder(tokenizer, apply_chat_template=True, system_prompt="0")
    assert tokenizer.decode(chat.encode(Problem(prompt="3+4=", answer=""))) == "a0a3+4=b"
    assert chat.text([*tokenizer.encode("7"), tokenizer.eos_token_id]) == "7"
