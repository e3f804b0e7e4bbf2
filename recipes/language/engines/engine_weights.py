"""The weights of an engine's model: their names and shapes in its folder, and LoRA adapters, merged or beside them."""

from __future__ import annotations

import importlib
import json
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from recipes.language.config.rollout_config import LARGEST_RANK
from recipes.language.engines.engine import ArrivingTensors
from recipes.language.models.architecture import stretched
from recipes.language.models.fingerprint import Fingerprint, fingerprint
from recipes.language.models.load_model import hollow_causal
from recipes.sections.model_folders import ADAPTED, read_settings
from recipes.training.tied_weights import names_of_one_tensor
from rlinf_core.config.sections.values import ensure_here

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# The adapter ranks that vLLM can reserve memory for.
_RANKS = (8, 16, 32, 64, 128, 256, 320, LARGEST_RANK)
_NAME, _NUMBER = "policy", 1


def reserved_rank(rank: int) -> int:
    """Return the smallest rank that vLLM can reserve memory for and that is at least `rank`."""
    return next(known for known in _RANKS if known >= rank)


class VllmAdapter:
    """The only adapter of an engine, replaced by each update.

    Args:
        rank: the rank of the adapter.
        scale: alpha / rank.
        dtype: the type of the written adapter.
    """

    def __init__(self, rank: int, scale: float, dtype: torch.dtype) -> None:
        self._rank = rank
        self._scale = scale
        self._dtype = dtype
        self._folder = Path(tempfile.mkdtemp(prefix="rlinf-adapter-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        # vLLM's reference to the adapter, which requests carry; None until one is loaded.
        self.request: Any = None

    @staticmethod
    def serves(rank: int, options: Mapping[str, Any]) -> bool:
        """Return whether vLLM supports an adapter of this rank, and `options` do not forbid it."""
        return 0 < rank <= _RANKS[-1] and options.get("enable_lora") is not False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM` for the adapter."""
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": reserved_rank(self._rank)}

    def load(self, llm_engine: Any, weights: Mapping[str, Tensor]) -> None:
        """Replace the adapter in an engine of vLLM by weights with peft's names.

        Raises:
            RuntimeError: vLLM did not load the adapter.
        """
        import safetensors.torch

        adapter_request: Any = importlib.import_module("vllm.lora.request").LoRARequest
        renamed = {name.replace(".default.weight", ".weight"): value for name, value in weights.items()}
        # Copy: safetensors refuses tensors that share memory, as those of one message do.
        tensors = {name: value.to("cpu", self._dtype, copy=True).contiguous() for name, value in renamed.items()}
        cast("Any", safetensors.torch).save_file(tensors, self._folder / "adapter_model.safetensors")
        layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self._rank,
            "lora_alpha": self._scale * self._rank,
            "target_modules": sorted(layers),
            "bias": "none",
        }
        (self._folder / ADAPTED).write_text(json.dumps(settings))
        # vLLM knows an adapter by its number, and rereads the folder only if asked to.
        asked = adapter_request(_NAME, _NUMBER, str(self._folder), load_inplace=True)
        if not llm_engine.add_lora(asked):
            raise RuntimeError("vLLM did not load the LoRA adapter")
        self.request = adapter_request(_NAME, _NUMBER, str(self._folder))


_PREFIX = "base_model.model."
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


class ModelWeights:
    """The weights of a model in this process: W + scale B A with an adapter (Hu et al., "LoRA", arXiv 2106.09685).

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
    def load_adapter(self, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Merge an adapter with peft's names of weights, and return its checksum.

        Raises:
            ValueError: a name does not belong to an adapter, or a shape is not the model's.
        """
        weights = dict(tensors)
        own: dict[str, Tensor] = self._model.state_dict()
        layers = _adapted_layers(weights, {name: tuple(weight.shape) for name, weight in own.items()})
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

    @torch.no_grad()
    def load_whole(self, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Replace all weights, and return their checksum.

        Raises:
            ValueError: the model lacks a name, a shape differs, or a weight is missing; nothing has changed.
        """
        own: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        arriving = ArrivingTensors.of(tensors)
        self._check_shapes(arriving.shapes, own)
        digest = Fingerprint()
        places = Counter(weight.data_ptr() for weight in {id(weight): weight for weight in own.values()}.values())
        for name, value in arriving:
            weight = own[name]
            # Replacing would separate parameters that share memory.
            alone = places[weight.data_ptr()] < 2
            if arriving.may_keep and alone and (weight.dtype, weight.device) == (value.dtype, value.device):
                weight.data = value
            else:
                weight.copy_(value)
            # Hash the engine's memory, in the trainer's precision, while it is in the processor's cache.
            digest.add(name, weight.to(value.dtype))
        self._original.clear()
        return digest.text()

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]], own: Mapping[str, Tensor]) -> None:
        for name, shape in shapes.items():
            target = own.get(name)
            if target is None:
                raise ValueError(f"the engine's model has no weight `{name}`")
            if tuple(target.shape) != shape:
                raise ValueError(f"weight `{name}` is {list(shape)}, the engine's model has {list(target.shape)}")
        there = {own[name].data_ptr() for name in shapes}
        missing = [name for name, weight in self._model.named_parameters() if weight.data_ptr() not in there]
        if missing:
            raise ValueError(f"weight `{missing[0]}` of the engine's model has no value")


def _adapted_layers(
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
        _adapted_layers(adapter, self._shapes)

    def merged(self, adapter: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the folder with an adapter added, in the type `dtype`.

        Raises:
            ValueError: a name does not belong to an adapter, or a shape is not the model's.
        """
        layers = _adapted_layers(adapter, self._shapes)

        def every() -> Iterator[tuple[str, Tensor]]:
            for file in self._files():
                for name in file.keys():  # noqa: SIM118
                    weight: Tensor = file.get_tensor(name)
                    if name in layers:
                        up, down = layers[name]
                        weight = weight.float().add_(up.float() @ down.float(), alpha=self._scale)
                    yield name, weight.to(dtype)

        return every()
