"""The sizes of a model's keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recipes.language.models.attention_rule import AttentionRule
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Columns that a cache grows by at least; on a GPU the decoding step is recorded again after each growth.
_GROWTH, _GROWTH_GPU = 64, 256


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes of a model's keys and values.

    Attributes:
        layers: number of attention layers.
        heads: key-value heads of a layer.
        dim: numbers of a head's key.
        value_dim: numbers of a head's value.
        dtype, device: the type and device of the tensors.
    """

    layers: int
    heads: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def growth(self) -> int:
        """Columns that a cache of it grows by at least."""
        return _GROWTH_GPU if self.device.type == "cuda" else _GROWTH

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token in all layers, in bytes."""
        return self.layers * self.heads * (self.dim + self.value_dim) * self.dtype.itemsize

    def empty(self, rows: int, columns: int, dim: int) -> Tensor:
        """Return memory for keys or values; zeros on a GPU, where a recorded step reads behind the newest column."""
        make = torch.zeros if self.device.type == "cuda" else torch.empty
        return make(rows, self.heads, columns, dim, dtype=self.dtype, device=self.device)


def cache_shape(model: PreTrainedModel) -> CacheShape:
    """Return the sizes of the keys and values of a model that `use_plans` has prepared, by a pass of one token.

    Raises:
        ConfigError: its layers have keys and values of unlike sizes.
    """
    probe = _ShapeProbe()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        model(input_ids=token, position_ids=token, use_cache=False, attention_plan=probe)
    sizes = set(probe.sizes)
    if len(sizes) != 1:
        raise ConfigError(
            f"the layers of `{type(model).__name__}` have keys and values of different sizes, or none",
            help="use a model family listed in docs/language-models.md",
        )
    return CacheShape(len(probe.sizes), *sizes.pop(), model.dtype, model.device)


class _ShapeProbe:
    """A plan that records the sizes of the layers' keys and values: heads, and numbers per key and value."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int, int]] = []

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """See `AttentionPlan`."""
        self.sizes.append((keys.shape[1], keys.shape[-1], values.shape[-1]))
        return values.repeat_interleave(queries.shape[1] // values.shape[1], dim=1)
