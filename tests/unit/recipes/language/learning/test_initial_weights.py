"""Weights that ranks read by the shard are those that transformers loads whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from recipes.language.models.load_model import hollow_causal, load_model
from recipes.language.models.policy import LanguagePolicy
from recipes.sections.actor import LoraSettings
from recipes.training.huggingface import with_lora
from recipes.training.tied_weights import require_finite
from recipes.training.weight_sources import WeightsOfRankZero, fill_weights, stored_weights, within
from recipes.training.without_memory import forget_weights, hollow_copy
from rlinf_core import ConfigError

HOST = torch.device("cpu")
SIZES: dict[str, Any] = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES.update({"num_attention_heads": 4, "max_position_embeddings": 256})
SHAPES: dict[str, Any] = {
    "Qwen2": {**SIZES, "num_key_value_heads": 2},
    # A file that holds one of two names.
    "tied Qwen2": {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True},
    # Names without the prefix of the model, and a projection stored the other way round.
    "GPT2": {"vocab_size": 101, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    # Angles that no file has.
    "GPTNeoX": SIZES,
}


def saved(name: str, folder: Path, **changes: Any) -> str:
    """Write a model with random weights into files of 100 KB, and return the folder."""
    config = getattr(transformers, f"{name.split()[-1]}Config")(**{**SHAPES.get(name, {}), **changes})
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="100KB")
    return str(folder)


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def check_equal(mine: nn.Module, theirs: nn.Module) -> None:
    expected = tensors(theirs)
    assert tensors(mine).keys() == expected.keys()
    for name, tensor in tensors(mine).items():
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.requires_grad == expected[name].requires_grad, name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_files_are_transformers_own(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    folder = saved(name, tmp_path)
    whole, hollow = load_model(folder, dtype), hollow_causal(folder, dtype)
    assert all(weight.is_meta for weight in hollow.parameters())
    stored = stored_weights(hollow, folder)
    assert stored is not None
    mine, theirs = LanguagePolicy(hollow), LanguagePolicy(whole)
    fill_weights(mine, within(mine, stored), HOST)
    check_equal(mine, theirs)


def test_adapters_begin_with_the_same_values(tmp_path: Path) -> None:
    folder = saved("tied Qwen2", tmp_path)
    models: list[Any] = []
    hollow = hollow_causal(folder, torch.bfloat16)
    stored = stored_weights(hollow, folder)
    assert stored is not None
    for model in (hollow, load_model(folder, torch.bfloat16)):
        torch.manual_seed(1)
        models.append(LanguagePolicy(with_lora(model, LoraSettings(rank=2))))
    mine, theirs = models
    fill_weights(mine, within(mine, stored), HOST)
    check_equal(mine, theirs)
    assert any(weight.abs().sum() > 0 for name, weight in mine.named_parameters() if "lora_A" in name)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    folder = saved("Qwen2", tmp_path)
    file = next(file for file in tmp_path.glob("*.safetensors") if "model.norm.weight" in load_file(file))
    weights = load_file(file)
    weights["model.norm.weight"][5] = value
    save_file(weights, file, {"format": "pt"})
    hollow = hollow_causal(folder)
    stored = stored_weights(hollow, folder)
    assert stored is not None
    mine = LanguagePolicy(hollow)
    with pytest.raises(ConfigError, match="no finite numbers") as read:
        fill_weights(mine, within(mine, stored), HOST)
    assert str(file) in str(read.value)
    with pytest.raises(ConfigError, match="no finite numbers") as loaded:
        load_model(folder, torch.float32)
    assert "`model.norm.weight` has 1 of 64, NaN or infinite" in str(loaded.value.why)


def test_large_weights_are_finite() -> None:
    require_finite([("large", torch.full((4,), 3e38)), ("counts", torch.arange(3))], "model.safetensors")
    with pytest.raises(ConfigError, match="no finite numbers"):
        require_finite([("large", torch.tensor([3e38, 3e38, float("inf")]))], "model.safetensors")


def test_weights_that_transformers_converts_are_left_to_it(tmp_path: Path) -> None:
    folder = saved("Mixtral", tmp_path, **SIZES, num_key_value_heads=2, num_local_experts=2)
    assert stored_weights(hollow_causal(folder), folder) is None


def test_weights_that_a_folder_lacks_are_left_to_transformers(tmp_path: Path) -> None:
    folder = saved("Qwen2", tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert stored_weights(hollow_causal(folder), folder) is None


def test_a_built_model_is_taken_from_rank_zero() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    whole[2].weight = nn.Parameter(torch.ones(2, 5), requires_grad=False)
    whole(torch.randn(8, 3))  # statistics that are no parameters
    hollow = hollow_copy(whole)
    whole[1].running_mean.add_(1)
    forget_weights(hollow)
    fill_weights(hollow, WeightsOfRankZero(whole), HOST)
    check_equal(hollow, whole)
