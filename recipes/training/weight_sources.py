"""Sources of initial weights: transformers models built without memory, and the weights in their folders.

Each rank's shard comes from a file, or from rank 0, the only rank that holds a whole model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.training.huggingface import check_folder, config_of, require_transformers
from recipes.training.tensor_files import StoredTensor, stored_tensors
from recipes.training.tied_weights import (
    beneath_adapters,
    by_names_of_model,
    names_of_one_tensor,
    require_finite,
    settle_ties,
)
from recipes.training.typed_tensors import is_shard
from recipes.training.without_memory import replace_parameters, without_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WeightSource(ABC):
    """The values of a model's parameters and buffers."""

    @abstractmethod
    def rows(self, name: str, like: Tensor, start: int, count: int) -> Tensor:
        """Return rows of a parameter, on the host. All ranks ask for the same parameters in the same order.

        Args:
            name: the name of the parameter in the model.
            like: the whole parameter, or another tensor of its shape and type.
            start, count: the first row, and the number of rows; a 0-D parameter has one row.
        """

    @abstractmethod
    def buffer(self, name: str, like: Tensor) -> Tensor | None:
        """Return a buffer of the model, on the host; None: the buffer keeps its initial values."""


class StoredWeights(WeightSource):
    """Weights in files, of which each rank reads its own rows.

    Args:
        tensors: the tensors by the model's names.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors

    def rows(self, name: str, like: Tensor, start: int, count: int) -> Tensor:
        """See `WeightSource`.

        Raises:
            ConfigError: the file holds values that are not finite.
        """
        stored = self._tensors[name]
        rows = stored.rows(start, count)
        require_finite([(name, rows)], str(stored.path))
        return rows

    def buffer(self, name: str, like: Tensor) -> Tensor | None:
        stored = self._tensors.get(name)
        return None if stored is None else stored.whole()


class WeightsOfRankZero(WeightSource):
    """The weights of a whole model that rank 0 has built or loaded on its host.

    Args:
        module: the model; None on other ranks.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._tensors: dict[str, Tensor] | None = None
        if module is not None:
            self._tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def rows(self, name: str, like: Tensor, start: int, count: int) -> Tensor:
        whole = self._received(name, like)
        return whole[start : start + count] if whole.dim() else whole

    def buffer(self, name: str, like: Tensor) -> Tensor | None:
        return self._received(name, like)

    def _received(self, name: str, like: Tensor) -> Tensor:
        if self._tensors is None:
            whole = torch.empty(like.shape, dtype=like.dtype)
        else:
            whole = self._tensors[name].detach().to("cpu", like.dtype).contiguous()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(whole, src=0)
        return whole


@torch.no_grad()
def fill_weights(module: nn.Module, source: WeightSource, device: torch.device) -> None:
    """Allocate the parameters without memory of a module and fill them from a source: of sharded parameters only this
    rank's rows. Set the buffers that the source has.

    Args:
        module: is changed in place; all ranks have equal modules.
        source: the source of the values.
        device: the device of the parameters.
    """
    names = {id(weight): name for name, weight in module.named_parameters()}

    def filled(weight: nn.Parameter) -> nn.Parameter | None:
        if not weight.is_meta:
            return None
        name, whole = names[id(weight)], torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        if not is_shard(weight):
            rows = source.rows(name, whole, 0, len(weight) if weight.dim() else 1).view(weight.shape)
            made: Tensor = torch.empty_like(whole, device=device).copy_(rows)
        else:
            from torch.distributed.tensor import DTensor, Shard

            local: Tensor = torch.empty_like(weight.to_local(), device=device)
            start = 0
            for dimension, placement in enumerate(weight.placements):
                if isinstance(placement, Shard):
                    share = -(-len(weight) // weight.device_mesh.size(dimension))
                    start = min(len(weight), share * weight.device_mesh.get_local_rank(dimension))
            local.copy_(source.rows(name, whole, start, len(local)))
            made = DTensor.from_local(
                local,
                weight.device_mesh,
                weight.placements,
                run_check=False,
                shape=weight.shape,
                stride=whole.stride(),
            )
        return nn.Parameter(made, requires_grad=weight.requires_grad)

    replace_parameters(module, filled)
    parts = cast("Iterable[tuple[str, nn.Module]]", module.named_modules())
    for place, part in parts:
        for name, buffer in list(part.named_buffers(recurse=False)):
            values = source.buffer(f"{place}.{name}" if place else name, buffer)
            if values is not None:
                setattr(part, name, values.to(device if buffer.is_meta else buffer.device, buffer.dtype))


def hollow_pretrained(loader: Any, folder: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model that a folder's configuration describes, without weights. No code of the folder is run.

    Args:
        loader: a class with `from_config`, such as `AutoModelForCausalLM`.
        folder: the folder, as `save_pretrained` writes it.
        dtype: the type of the weights.

    Raises:
        ConfigError: the folder does not exist.
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
    """Return the weights that a folder stores for a model, by name.

    Args:
        model: a model of `hollow_pretrained`.
        folder: the folder of its weights.

    Returns:
        None if transformers combines several tensors into a weight, or the folder lacks some: transformers must load
            it.
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
    # Of weights that layers share, the file may store only one name, not necessarily the first.
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
    """Return the weights of a model under the names of a module that wraps it as `model`, possibly with adapters."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    names = beneath_adapters([name.removeprefix("model.") for name, _ in tensors], stored)
    return StoredWeights({f"model.{mine}": stored[theirs] for mine, theirs in names.items()})
