"""A LoRA adapter merged into the weights of an engine's model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recipes.language.models.fingerprint import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFIX = "base_model.model."
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


class MergedAdapter:
    """Weights with a merged adapter, W + scale B A (Hu et al., "LoRA", arXiv 2106.09685), and the original weights.

    Merged weights decode as fast as plain ones. The original weights of adapted layers are kept, so that a new adapter
    replaces the earlier one exactly.

    Args:
        model: the model whose weights are changed in place.
        scale: alpha / rank.
    """

    def __init__(self, model: PreTrainedModel, scale: float) -> None:
        self._model = model
        self._scale = scale
        self._original: dict[str, Tensor] = {}

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Merge an adapter with peft's names of weights, and return its checksum.

        Raises:
            ValueError: a name does not belong to an adapter, or a shape is not the model's.
        """
        weights = dict(tensors)
        own: dict[str, Tensor] = self._model.state_dict()
        layers = adapted_layers(weights, {name: tuple(weight.shape) for name, weight in own.items()})
        for name, (up, down) in layers.items():
            target = own[name]
            original = self._original.get(name)
            if original is None:
                original = self._original[name] = target.clone()
            target.copy_(original).add_(up.to(target) @ down.to(target), alpha=self._scale)
        return fingerprint(weights.items())

    @property
    def is_merged(self) -> bool:
        """Whether an adapter was merged since the weights were loaded."""
        return bool(self._original)

    def forget(self) -> None:
        """Drop the original weights, after the model got new ones."""
        self._original.clear()


def adapted_layers(
    adapter: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the matrices B and A of an adapter, by the names of the weights that they change.

    Args:
        adapter: the adapter's weights, by peft's names.
        shapes: the shapes of the model's weights, by name.

    Raises:
        ValueError: a name does not belong to an adapter, or a shape is not the model's.
    """
    layers: dict[str, tuple[Tensor, Tensor]] = {}
    for name, down in adapter.items():
        if not name.endswith(_A):
            if not name.endswith(_B):
                raise ValueError(f"`{name}` is not a LoRA weight")
            continue
        layer = name.removesuffix(_A)
        weight = f"{layer.removeprefix(_PREFIX)}.weight"
        up = adapter.get(layer + _B)
        if weight not in shapes or up is None:
            raise ValueError(f"the engine's model has no layer `{layer}` for the adapter")
        if shapes[weight] != (up.shape[0], down.shape[1]):
            raise ValueError(f"the adapter of `{layer}` does not fit weights of {list(shapes[weight])}")
        layers[weight] = up, down
    return layers
