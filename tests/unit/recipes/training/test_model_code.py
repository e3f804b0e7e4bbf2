"""Folders of models that bring code, and versions of packages where workers load models."""

from __future__ import annotations

import builtins
import importlib.metadata
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from recipes.demonstrations.columns import DatasetError, needed
from recipes.language.models.load_model import built_model, built_tokenizer
from recipes.sections.actor import LoraSettings
from recipes.training.huggingface import cache_name, config_of, load_pretrained, load_tokenizer, with_lora
from rlinf_core import ConfigError, load_job
from tests.payloads import code, template

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

    from recipes.embodied.models.vla.openvla_network import read_shape
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


JOB = """recipe: {recipe}
cluster:
  num_nodes: 1
  component_placement:
    {components}: {{node_group: node, placement: 0}}
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Pretends that a package is installed in another version."""
    real = importlib.metadata.version

    def pretend(package: str, version: str) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else real(name))

    return pretend


def test_a_worker_with_another_transformers_loads_nothing(installed: Any, tmp_path: Path) -> None:
    installed("transformers", "4.57.1")
    with pytest.raises(ConfigError, match=r"`transformers`, of which this Python has 4\.57\.1, out of .* >=5\.3,<6"):
        load_tokenizer(str(tmp_path))


def test_a_transformers_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Refusing:
        def __getattr__(self, name: str) -> Any:
            raise ImportError("huggingface-hub<2.0 is required, but found huggingface-hub==2.4.0\nTry: pip install")

    monkeypatch.setitem(sys.modules, "transformers.utils", Refusing())
    with pytest.raises(ConfigError, match="the installed transformers cannot be imported") as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.why == "huggingface-hub<2.0 is required, but found huggingface-hub==2.4.0"


def test_adapters_of_another_peft_are_refused(installed: Any) -> None:
    model = built_model(built_tokenizer(), hidden_dim=32, layers=1)
    installed("peft", "0.16.0")
    with pytest.raises(ConfigError, match=r"peft.*0\.16\.0") as caught:
        with_lora(model, LoraSettings())
    assert "pip install 'peft>=0.17,<1'" in str(caught.value.help)


def test_data_of_another_reader_are_refused(installed: Any) -> None:
    installed("av", "13.1.0")
    with pytest.raises(DatasetError, match=r"a video needs the package `av`, of which this Python has 13\.1\.0"):
        needed("av", "a video")


@pytest.mark.parametrize(
    ("recipe", "components", "override", "package", "version"),
    [
        ("math", "actor,rollout,reward", "runner.max_steps=1", "transformers", "4.57.1"),
        ("math", "actor,rollout,reward", "actor.model.lora={rank: 32}", "peft", "0.16.0"),
        ("sft_chat", "actor", "runner.max_steps=1", "transformers", "6.0.0"),
        ("embodied", "actor,rollout,env", "actor.model.model_type=pi0", "transformers", "4.57.1"),
        ("embodied", "actor,rollout,env", "env.train.env_type=franka_mujoco", "mujoco", "3.2.7"),
    ],
)
def test_validation_knows_the_versions_that_a_job_needs(
    recipe: str, components: str, override: str, package: str, version: str, installed: Any, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB.format(recipe=recipe, components=components))

    def missing() -> list[str]:
        diagnostics = load_job(file, [override]).diagnostics
        return [f"{finding.message} {finding.help}" for finding in diagnostics if finding.code == "missing-extra"]

    assert missing() == []
    installed(package, version)
    (said,) = missing()
    assert f"`{package}`, of which this Python has {version}, out of the range >=" in said
    assert f"pip install '{package}>=" in said


def test_the_cache_has_the_name_that_the_model_gives_it() -> None:
    def since_5_24(input_ids: object, cache: object = None) -> None: ...

    def before(input_ids: object, past_key_values: object = None) -> None: ...

    assert [cache_name(since_5_24), cache_name(before)] == ["cache", "past_key_values"]
