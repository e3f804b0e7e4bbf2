"""The folder of an engine's model, and checks of weights for the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from recipes.language.engines.own.merged_adapter import adapted_layers
from recipes.language.models.architecture import stretched
from recipes.language.models.load_model import hollow_causal
from recipes.sections.model_folders import read_settings
from recipes.training.tied_weights import names_of_one_tensor
from rlinf_core.config.sections.hub_names import ensure_here


class ModelFolder:
    """A model's folder: names and shapes of its weights, and the weights merged with LoRA adapters.

    Args:
        folder: the folder with config.json and *.safetensors.
        adapter_scale: alpha / rank of adapters.
    """

    def __init__(self, folder: str | Path, adapter_scale: float = 1.0) -> None:
        ensure_here(folder)
        self._folder = Path(folder)
        self._scale = adapter_scale

    @cached_property
    def _config(self) -> dict[str, Any]:
        config = read_settings(self._folder / "config.json")
        return {**config, **config.get("text_config", {})}

    def longest(self, asked: int) -> int:
        """Return the maximum sequence length: the requested one, limited by the model's positions."""
        config = self._config
        positions = int(config.get("max_position_embeddings", 0))
        positions = stretched(positions, config.get("rope_parameters") or config.get("rope_scaling"))
        return min(asked or positions, positions or asked)

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary; 0 if the configuration has none."""
        return int(self._config.get("vocab_size", 0))

    @property
    def width(self) -> int:
        """Width of the model."""
        return int(self._config["hidden_size"])

    def cache_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the memory of one token's keys and values in all layers, in bytes."""
        config = self._config
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return 2 * config["num_hidden_layers"] * heads * dim * dtype.itemsize

    def _files(self) -> Iterator[Any]:
        from safetensors import safe_open

        for path in sorted(self._folder.glob("*.safetensors")):
            with cast("Any", safe_open)(path, framework="pt") as file:
                yield file

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for file in self._files() for name in file.keys()}  # noqa: SIM118

    @cached_property
    def _ties(self) -> dict[str, tuple[str, ...]]:
        """All names of each shared weight, by each of its names."""
        if not self._config.get("tie_word_embeddings", True):
            return {}
        state = hollow_causal(str(self._folder)).state_dict(keep_vars=True)
        return {name: names for names in names_of_one_tensor(state).values() if len(names) > 1 for name in names}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that names and shapes are those of a complete set of weights.

        Raises:
            ValueError: the model lacks a name, a shape differs, or a weight is missing.
        """
        covered = set[str]()
        for name, arriving in shapes.items():
            names = self._ties.get(name, (name,))
            shape = next((self._shapes[one] for one in names if one in self._shapes), None)
            if shape is None:
                raise ValueError(f"the engine's model has no weight `{name}`")
            if shape != arriving:
                raise ValueError(f"weight `{name}` is {list(arriving)}, the engine's model has {list(shape)}")
            covered.update(names)
        missing = [name for name in self._shapes if name not in covered]
        if missing:
            raise ValueError(f"weight `{missing[0]}` of the engine's model has no value")

    def checked(self, weights: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Return a complete set of weights, after `check`."""
        self.check({name: tuple(value.shape) for name, value in weights.items()})
        return list(weights.items())

    def check_adapter(self, adapter: Mapping[str, Tensor]) -> None:
        """Check that an adapter fits this model.

        Raises:
            ValueError: a name does not belong to an adapter, or a shape is not the model's.
        """
        adapted_layers(adapter, self._shapes)

    def merged(self, adapter: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the folder with an adapter added, in the type `dtype`.

        Raises:
            ValueError: a name does not belong to an adapter, or a shape is not the model's.
        """
        layers = adapted_layers(adapter, self._shapes)

        def every() -> Iterator[tuple[str, Tensor]]:
            for file in self._files():
                for name in file.keys():  # noqa: SIM118
                    weight: Tensor = file.get_tensor(name)
                    if name in layers:
                        up, down = layers[name]
                        weight = weight.float().add_(up.float() @ down.float(), alpha=self._scale)
                    yield name, weight.to(dtype)

        return every()
