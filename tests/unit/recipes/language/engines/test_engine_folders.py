"""Folders of models that engines start from, and adapters and weights that are checked against them."""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.language.engines import vllm_engine
from recipes.language.engines.engine_weights import ModelFolder, ModelWeights
from recipes.language.engines.registry import make_engine
from recipes.language.engines.torch_engine import TorchEngine
from recipes.language.models.load_model import built_tokenizer
from rlinf_core.errors import ConfigError
from tests.unit.recipes.language.engines.contract import answer_to, contract_model, greedy
from tests.unit.recipes.language.tiny import job_config

CPU = torch.device("cpu")


def config(backend: str) -> Any:
    sizes = ("actor.model.hidden_dim=32", "actor.model.num_layers=1", "runner.seq_length=32")
    return job_config(*sizes, f"rollout.backend={backend}", sound=False)


class Reading:
    """Stands for an engine that reads a folder: draws with the model in it."""

    def __init__(self, folder: str, **options: Any) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=options["dtype"])
        self.engine = TorchEngine(model, stop_token_ids=options["stop_token_ids"])


def test_locally_built_model_is_written_for_another_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(vllm_engine, "VllmEngine", Reading)
    tokenizer = built_tokenizer()
    ours = make_engine(config("torch"), tokenizer, (1,), CPU)
    assert isinstance(ours, TorchEngine)
    other: Any = make_engine(config("vllm"), tokenizer, (1,), CPU)
    assert answer_to(other.engine, (4, 5, 6), greedy(6)).tokens == answer_to(ours, (4, 5, 6), greedy(6)).tokens
    assert list(tmp_path.glob("rlinf-model-*"))
    del other
    gc.collect()
    assert not list(tmp_path.glob("rlinf-model-*"))


def test_an_engine_that_does_not_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="needs the package vllm") as raised:
        make_engine(config("vllm"), built_tokenizer(), (1,), CPU)
    assert "python_interpreter_path" in (raised.value.help or "")
    assert not list(tmp_path.glob("rlinf-model-*"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    contract_model().save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def adapter() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    return {
        f"{layer}.lora_A.default.weight": torch.randn(4, 64),
        f"{layer}.lora_B.default.weight": torch.randn(64, 4),
    }


def test_merged_weights_are_those_of_our_engine(folder: Path) -> None:
    model: Any = contract_model()
    ModelWeights(model, 2.0).load_adapter(adapter().items())
    result = dict(ModelFolder(folder, 2.0).merged(adapter(), torch.float32))
    expected = model.state_dict()
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, atol=1e-5, rtol=0)
    halves = dict(ModelFolder(folder, 2.0).merged(adapter(), torch.bfloat16))
    assert {value.dtype for value in halves.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nothing.lora_A.default.weight": torch.zeros(4, 64)}, "no layer `nothing`"),
        ({"nothing": torch.zeros(1)}, "not a LoRA weight"),
        ({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(4, 9)}, "does not fit"),
    ],
)
def test_an_adapter_of_another_model_is_refused(folder: Path, change: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(ModelFolder(folder).merged({**adapter(), **change}, torch.float32))


def test_a_set_of_weights_is_whole(folder: Path) -> None:
    whole = dict(contract_model().state_dict())
    model = ModelFolder(folder)
    assert dict(model.checked(whole)).keys() == whole.keys()
    for change, words in (
        ({**whole, "nothing": torch.zeros(1)}, "no weight `nothing`"),
        ({**whole, "model.norm.weight": torch.zeros(1)}, r"`model\.norm\.weight` is \[1\]"),
        ({name: value for name, value in whole.items() if name != "model.norm.weight"}, "has no value"),
    ):
        with pytest.raises(ValueError, match=words):
            model.checked(change)


def test_a_model_with_shared_embeddings_is_sent_once(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    whole = dict(model.state_dict())
    result = ModelFolder(tmp_path)
    assert result.checked(whole)
    assert result.checked({name: value for name, value in whole.items() if name != "lm_head.weight"})
    assert result.longest(0) == config.max_position_embeddings
    assert result.longest(10**9) == config.max_position_embeddings
    assert result.cache_bytes_per_token(torch.bfloat16) == 2 * 1 * 32 * 2
