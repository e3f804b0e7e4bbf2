"""Sources of first weights: a shard of each is taken from a file, or from rank 0, which alone has a model whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.training.reading.finite_weights import require_finite
from recipes.training.tensor_files import StoredTensor
from recipes.training.typed_tensors import is_shard
from recipes.training.without_memory import replace_parameters


class WeightSource(ABC):
    """The values of a model's parameters and buffers."""

    @abstractmethod
    def rows(self, name: str, like: Tensor, start: int, count: int) -> Tensor:
        """Return rows of a parameter, on the host. All ranks ask for the same parameters in the same order.

        Args:
            name: the name of the parameter in the model.
            like: the whole parameter, or another tensor of its shape and type.
            start, count: which rows; of a parameter without dimensions there is one.
        """

    @abstractmethod
    def buffer(self, name: str, like: Tensor) -> Tensor | None:
        """Return a buffer of the model, on the host; None: it stays as it was made."""


class StoredWeights(WeightSource):
    """The weights of files, of which a rank reads its own rows.

    Args:
        tensors: the tensors by the names of the model.
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
        """See `WeightSource`."""
        stored = self._tensors.get(name)
        return None if stored is None else stored.rows(0, stored.shape[0] if stored.shape else 1).view(stored.shape)


class WeightsOfRankZero(WeightSource):
    """The weights of a model that rank 0 has built or loaded, whole, on its host.

    Args:
        module: the model; None on other ranks.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._tensors: dict[str, Tensor] | None = None
        if module is not None:
            self._tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def rows(self, name: str, like: Tensor, start: int, count: int) -> Tensor:
        """See `WeightSource`."""
        whole = self._received(name, like)
        return whole[start : start + count] if whole.dim() else whole

    def buffer(self, name: str, like: Tensor) -> Tensor | None:
        """See `WeightSource`."""
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
    """Give the parameters without memory of a module memory with the values of a source, those that are sharded for
    this rank's rows alone; and buffers their values.

    Args:
        module: is changed in place; all ranks have equal ones.
        source: the source of the values.
        device: where parameters are to be.
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
