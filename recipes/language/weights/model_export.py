"""Trained models as folders that transformers and engines load, written a tensor at a time."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from recipes.language.config import LanguageActorConfig
from recipes.language.engines.own.merged_adapter import MergedAdapter
from recipes.language.models.load_model import hollow_causal, make_model
from recipes.training.state.training_state import TrainingState
from recipes.training.typed_tensors import DTYPES
from recipes.training.weights.sent_weights import own_weights
from recipes.training.weights.tensor_writer import Described, TensorWriter
from recipes.training.without_memory import without_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_POLICY, _PEFT, _BASE = "model.", "model.base_model.model.", ".base_layer."
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


def export_state(
    state: TrainingState, config: LanguageActorConfig, tokenizer: PreTrainedTokenizerBase, folder: str, *, writes: bool
) -> None:
    """Export the weights that ranks train together; every rank calls it, and one of them writes the folder."""
    weights = state.whole_tensors()
    if writes:
        export(weights, config, tokenizer, Path(folder))
    # All ranks gather each of them.
    for _ in weights:
        pass


@torch.no_grad()
def export(
    weights: Iterable[tuple[str, Tensor]],
    config: LanguageActorConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    """Write config, safetensors and tokenizer; a LoRA adapter is merged. Written aside and renamed.

    Args:
        weights: the `state_dict` of a `LanguagePolicy`, in its order; of its weights one or two are held at a time.
        config: the configuration of the actor, which decides the architecture.
        tokenizer: the tokenizer of the model.
        folder: the folder to write; replaced where it is there.
    """
    hollow = _hollow(config, tokenizer)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    lora = config.model.adapter()
    if _is_converted(hollow):
        model = make_model(config, tokenizer, DTYPES[config.model.precision])
        _load(model, dict(weights), None if lora is None else lora.alpha / lora.rank)
        _settle(model)
        model.save_pretrained(aside)
    else:
        _save_settings(hollow, config.model.model_path, aside)
        described = {name: Described(weight.dtype, tuple(weight.shape)) for name, weight in own_weights(hollow).items()}
        with TensorWriter(aside, described) as writer:
            for name, weight in _plain(weights, None if lora is None else lora.alpha / lora.rank):
                if name in described:
                    writer.write(name, weight)
            writer.finish()
    tokenizer.save_pretrained(str(aside))
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def _hollow(config: LanguageActorConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the model without memory, in the type that it is written in."""
    dtype = DTYPES[config.model.precision]
    if config.model.model_path is not None:
        return hollow_causal(config.model.model_path, dtype)
    with without_memory():
        return make_model(config, tokenizer, dtype)


def _is_converted(model: PreTrainedModel) -> bool:
    """Return whether transformers writes other tensors than the weights of the model, such as one for each expert."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: weight.detach().to("meta") for name, weight in own_weights(model).items()}
    written: Mapping[str, Tensor] = cast("Any", revert_weight_conversion)(model, dict(shapes))
    return _shapes(written) != _shapes(shapes)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _plain(weights: Iterable[tuple[str, Tensor]], scale: float | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a policy by the names of its model, those of adapted layers with their adapter merged.

    Args:
        weights: the matrices of an adapter follow what they are added to.
        scale: alpha / rank of the adapter; None: there is none.
    """
    if scale is None:
        yield from ((name.removeprefix(_POLICY), weight) for name, weight in weights if name.startswith(_POLICY))
        return
    base: dict[str, Tensor] = {}
    down: dict[str, Tensor] = {}
    for name, weight in weights:
        plain = name.removeprefix(_PEFT)
        if name.endswith(_A):
            down[plain.removesuffix(_A)] = weight
        elif name.endswith(_B):
            layer = plain.removesuffix(_B)
            target = base.pop(layer).clone()
            # As `MergedAdapter` does.
            yield (
                f"{layer}.weight",
                target.add_(weight.to(target) @ down.pop(layer).to(target), alpha=scale),
            )
        elif plain.endswith(f"{_BASE}weight"):
            base[plain.removesuffix(f"{_BASE}weight")] = weight
        else:
            yield plain.replace(_BASE, "."), weight


def _load(model: PreTrainedModel, weights: Mapping[str, Tensor], scale: float | None) -> None:
    """Give a model the weights of a policy; see `_plain`."""
    if scale is None:
        model.load_state_dict(dict(_plain(weights.items(), None)), strict=False)
        return
    adapter = {name.removeprefix(_POLICY): value for name, value in weights.items() if ".lora_" in name}
    MergedAdapter(model, scale).load(adapter.items())


def _settle(model: PreTrainedModel) -> None:
    # A name of ours for the attention function must not be in a file that others read.
    cast("Any", model.config)._attn_implementation = "sdpa"


def _save_settings(model: PreTrainedModel, source: str | None, folder: Path) -> None:
    """Write what `save_pretrained` of transformers writes besides weights."""
    _settle(model)
    config: Any = model.config
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        generation: Any = model.generation_config
        if source is not None:
            from transformers import GenerationConfig

            with suppress(OSError):
                generation = GenerationConfig.from_pretrained(source)
        generation.save_pretrained(folder)
