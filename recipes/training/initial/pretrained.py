"""Models of transformers built without allocating memory, and the weights in their folders."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recipes.training.huggingface import check_folder, config_of, require_transformers
from recipes.training.initial.weight_sources import StoredWeights
from recipes.training.reading.adapter_names import beneath_adapters
from recipes.training.reading.tied_weights import by_names_of_model, names_of_one_tensor, settle_ties
from recipes.training.tensor_files import StoredTensor, stored_tensors
from recipes.training.without_memory import without_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def hollow_pretrained(loader: Any, folder: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model that a folder has the configuration of, without weights. No code of the folder is run.

    Args:
        loader: a class with `from_config`, such as `AutoModelForCausalLM`.
        folder: the folder, as `save_pretrained` writes one.
        dtype: the type of the weights.

    Raises:
        ConfigError: it does not exist.
    """
    require_transformers()
    from transformers import AutoConfig

    check_folder(folder)
    config = config_of(AutoConfig, folder)
    with without_memory():
        model = loader.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    settle_ties(model, folder)
    return model


def stored_weights(model: PreTrainedModel, folder: str) -> dict[str, StoredTensor] | None:
    """Return the weights that a folder has for a model, by name.

    Args:
        model: see `hollow_pretrained`.
        folder: the folder of its weights.

    Returns:
        None where transformers makes weights of several tensors, or where the folder lacks some: it has to load them.
    """
    tensors = stored_tensors(Path(folder))
    if tensors is None or getattr(model.config, "quantization_config", None) is not None:
        return None
    exact = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    if model.dtype != torch.float32 and any(getattr(model, name, None) for name in exact):
        return None
    own: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    named = by_names_of_model(model, tensors)
    weights: dict[str, StoredTensor] = {}
    # Of weights that layers share the file may hold one alone, under a name that is not the first.
    for names in names_of_one_tensor(own).values():
        stored = next((named.tensors[name] for name in names if name in named.tensors), None)
        weight = own[names[0]]
        if not named.complete or stored is None or stored.shape != tuple(weight.shape):
            return None
        if weight.is_floating_point() and stored.dtype.itemsize == 1:
            return None
        weights |= dict.fromkeys(names, stored)
    return weights


def within(module: nn.Module, stored: Mapping[str, StoredTensor]) -> StoredWeights:
    """Return the weights of a model as those of a module that has it as its `model`, possibly with adapters."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    names = beneath_adapters([name.removeprefix("model.") for name, _ in tensors], stored)
    return StoredWeights({f"model.{mine}": stored[theirs] for mine, theirs in names.items()})
