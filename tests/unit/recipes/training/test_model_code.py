"""Folders of models that bring code: none of it runs, whoever sits at the terminal."""

from __future__ import annotations

import builtins
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from recipes.training.huggingface import config_of, load_pretrained, load_tokenizer
from rlinf_core import ConfigError
from tests.payloads import code, template

pytest.importorskip("transformers")

AUTO = {kind: f"modeling_x.{kind[4:]}" for kind in ("AutoConfig", "AutoModelForCausalLM", "AutoModel")}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose model is defined by code in it, before somebody who says yes to everything."""
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    path = tmp_path / "model"
    path.mkdir()
    tokens = {"AutoTokenizer": ["modeling_x.Tokens", "modeling_x.Tokens"]}
    (path / "modeling_x.py").write_text(code(tmp_path / "marker"))
    (path / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": {**AUTO, **tokens}}))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tokens", "auto_map": tokens}))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return path


def test_code_of_a_model_folder_does_not_run(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for load in (
        lambda: load_tokenizer(str(folder)),
        lambda: config_of(AutoConfig, str(folder)),
        lambda: load_pretrained(AutoModelForCausalLM, str(folder)),
    ):
        with pytest.raises(ConfigError):
            load()
    assert not (folder.parent / "marker").exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_compiled_code_of_the_hub_is_refused(folder: Path, key: str) -> None:
    from transformers import AutoConfig

    for value in ("somebody/attention", {"": "somebody/attention"}):
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "text_config": {key: value}}))
        with pytest.raises(ConfigError, match="needs remote code, which is never run"):
            config_of(AutoConfig, str(folder))


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("attention_dropout", 1e30, "from 0 to 1"),
        ("hidden_dropout_prob", -0.5, "from 0 to 1"),
        ("num_hidden_layers", 10**9, "at most 10000"),
        ("hidden_size", 1 << 40, "at most 1048576"),
        ("vocab_size", 1 << 40, "at most 16777216"),
        ("use_cache", "no", "true or false"),
    ],
)
def test_a_setting_that_no_model_has_is_refused(folder: Path, key: str, value: Any, wanted: str) -> None:
    from transformers import AutoConfig

    from recipes.embodied.models.openvla.openvla_folder import read_shape
    from recipes.embodied.models.vla.pi_folder import load_pi0

    loaders = {"llama": partial(config_of, AutoConfig), "pi0": load_pi0, "openvla": read_shape}
    for kind, load in loaders.items():
        (folder / "config.json").write_text(json.dumps({"model_type": kind, "text_config": {key: value}}))
        with pytest.raises(ConfigError, match=f"`{key}` of the model in") as raised:
            load(str(folder))
        assert f"it should be {wanted}" in str(raised.value)


def test_a_chat_template_reaches_nothing_but_messages(tmp_path: Path) -> None:
    from jinja2.exceptions import SecurityError, UndefinedError
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    marker = tmp_path / "marker"
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    reach = "{{ ''.__class__.__base__.__subclasses__() }}{{ messages.append.__self__ }}"
    for text in (template(marker).decode(), reach, "{{ raise_exception.__globals__['os'].system('true') }}"):
        tokenizer.chat_template = text
        with pytest.raises((SecurityError, UndefinedError)):
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert not marker.exists()
