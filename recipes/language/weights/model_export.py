"""Trained models as folders that transformers and engines load, written a tensor at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from recipes.language.config.language_config import LanguageActorConfig
from recipes.language.engines.engine_weights import ModelWeights
from recipes.language.models.fingerprint import fingerprint
from recipes.language.models.load_model import hollow_causal, make_model, stop_token_ids
from recipes.language.models.policy import AnswerModel
from recipes.language.weights.written_model import LOADED, check_written, expected_logprobs
from recipes.training.tensor_files import Described, TensorFile
from recipes.training.typed_tensors import DTYPES
from recipes.training.weights.training_state import TrainingState
from recipes.training.weights.weight_sync import own_weights
from recipes.training.without_memory import without_memory
from rlinf_core import CheckpointError
from rlinf_core.foreign.files import lacks_room, write_fault
from rlinf_core.runners.storage.first_contact import Difference, FirstContact

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# The maximum bytes of a file, unless a single tensor is larger.
FILE_BYTES: Final = 5 << 30


class ModelWriter:
    """A context that writes `model.safetensors`, or several files and their index, with transformers' names.

    Args:
        folder: the existing folder.
        tensors: descriptions of the tensors to write, each once, in any order.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Described]) -> None:
        self._stack = ExitStack()
        self._files: dict[str, TensorFile] = {}
        groups = _groups(tensors)
        named = {_name(number, len(groups)): group for number, group in enumerate(groups)}
        for name, group in named.items():
            file = self._stack.enter_context(TensorFile(folder / name, {tensor: tensors[tensor] for tensor in group}))
            self._files |= dict.fromkeys(group, file)
        if len(groups) > 1:
            total = sum(tensor.nbytes for tensor in tensors.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {tensor: name for name, group in named.items() for tensor in group},
            }
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> ModelWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(self, name: str, tensor: Tensor) -> None:
        self._files[name].write(name, tensor)

    def finish(self) -> None:
        """Flush all files to the disk.

        Raises:
            ValueError: a tensor was not written.
        """
        left = sorted(name for file in set(self._files.values()) for name in file.left)
        if left:
            raise ValueError(f"`{left[0]}` has no value")
        self._stack.close()


def _groups(tensors: Mapping[str, Described]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for name, described in tensors.items():
        if groups[-1] and size + described.nbytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += described.nbytes
    return groups


def _name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


_POLICY, _PEFT, _BASE = "model.", "model.base_model.model.", ".base_layer."
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


def export_state(
    state: TrainingState,
    config: LanguageActorConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    contact: FirstContact,
    *,
    writes: bool,
) -> None:
    """Export weights that several ranks train. Collective: all ranks call it, and one writes the folder.

    Args:
        state: the training state of the ranks.
        config, tokenizer, folder: see `export`.
        contact: the start-up checks to which the comparison is added.
        writes: whether this rank writes.

    Raises:
        RLinfError: transformers loads another model from the folder, or the disk is full.
    """
    with state.onloaded():
        expected = expected_logprobs(cast("AnswerModel", state.policy), DTYPES[config.model.precision])
    weights = state.whole_tensors()
    if writes:

        def check(aside: Path, fingerprints: Mapping[str, str]) -> None:
            what = f"log-probabilities of the actor, for `{Path(folder).name}`"
            if fingerprints == state.written:
                contact.keep(what, LOADED, Difference(note="weights equal to those of the folder written before"))
            else:
                contact.compare(what, LOADED, lambda: check_written(aside, fingerprints, expected))
            state.written = fingerprints

        export(weights, config, tokenizer, Path(folder), check)
    # Gather each weight, which all ranks must do together.
    for _ in weights:
        pass


@torch.no_grad()
def export(
    weights: Iterable[tuple[str, Tensor]],
    config: LanguageActorConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    check: Callable[[Path, Mapping[str, str]], None],
) -> None:
    """Write config, safetensors and tokenizer atomically, after a check; a LoRA adapter is merged.

    Args:
        weights: the `state_dict` of a `LanguagePolicy`, in its order; one or two weights are in memory at a time.
        config: the configuration of the actor, which defines the architecture.
        tokenizer: the tokenizer of the model.
        folder: the folder to write; an existing one is replaced.
        check: receives the written folder and the checksum of each weight by name; if it raises, nothing is kept.
    """
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        fingerprints = _write(weights, config, tokenizer, aside)
        tokenizer.save_pretrained(str(aside))
        check(aside, fingerprints)
    except BaseException as error:
        why = write_fault(aside, error) if lacks_room(error) else None
        shutil.rmtree(aside, ignore_errors=True)
        if why is None:
            raise
        raise CheckpointError("the model cannot be written", where=str(folder), why=why) from error
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def _write(
    weights: Iterable[tuple[str, Tensor]],
    config: LanguageActorConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> dict[str, str]:
    """Write settings and weights into a folder, and return the checksum of each weight by name."""
    hollow = _hollow(config, tokenizer)
    lora = config.model.adapter()
    scale = None if lora is None else lora.alpha / lora.rank
    if _is_converted(hollow):
        model = make_model(config, tokenizer, DTYPES[config.model.precision])
        _load(model, dict(weights), scale)
        _settle(model)
        model.save_pretrained(folder)
        _save_generation(model, config.model.model_path, tokenizer, folder)
        return {name: fingerprint([(name, weight)]) for name, weight in own_weights(model).items()}
    _save_settings(hollow, folder)
    _save_generation(hollow, config.model.model_path, tokenizer, folder)
    described = {name: Described(weight.dtype, tuple(weight.shape)) for name, weight in own_weights(hollow).items()}
    others = hollow.state_dict().keys() - described.keys()
    fingerprints: dict[str, str] = {}
    with ModelWriter(folder, described) as writer:
        for name, weight in _plain(weights, scale):
            # Write a weight with several names only under the first.
            if name not in others:
                value = weight.to(described[name].dtype)
                writer.write(name, value)
                fingerprints[name] = fingerprint([(name, value)])
        writer.finish()
    return fingerprints


def _hollow(config: LanguageActorConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the model without memory, in the type of the written weights."""
    dtype = DTYPES[config.model.precision]
    if config.model.model_path is not None:
        return hollow_causal(config.model.model_path, dtype)
    with without_memory():
        return make_model(config, tokenizer, dtype)


def _is_converted(model: PreTrainedModel) -> bool:
    """Return whether transformers writes other tensors than the model's weights, such as one per expert."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: weight.detach().to("meta") for name, weight in own_weights(model).items()}
    written: Mapping[str, Tensor] = cast("Any", revert_weight_conversion)(model, dict(shapes))
    return _shapes(written) != _shapes(shapes)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _plain(weights: Iterable[tuple[str, Tensor]], scale: float | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a policy by its model's names, with adapters merged.

    Args:
        weights: the policy's weights; an adapter's matrices must follow the weight that they change.
        scale: alpha / rank of the adapter; None: no adapter.
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
            # The same as in `ModelWeights`.
            yield (
                f"{layer}.weight",
                target.add_(weight.to(target) @ down.pop(layer).to(target), alpha=scale),
            )
        elif plain.endswith(f"{_BASE}weight"):
            base[plain.removesuffix(f"{_BASE}weight")] = weight
        else:
            yield plain.replace(_BASE, "."), weight


def _load(model: PreTrainedModel, weights: Mapping[str, Tensor], scale: float | None) -> None:
    """Load the weights of a policy into a model; see `_plain`."""
    if scale is None:
        model.load_state_dict(dict(_plain(weights.items(), None)))
        return
    adapter = {name.removeprefix(_POLICY): value for name, value in weights.items() if ".lora_" in name}
    ModelWeights(model, scale).load_adapter(adapter.items())


def _settle(model: PreTrainedModel) -> None:
    # Keep our name of the attention function out of files that others read.
    cast("Any", model.config)._attn_implementation = "sdpa"


def _save_settings(model: PreTrainedModel, folder: Path) -> None:
    """Write the configuration that transformers' `save_pretrained` writes."""
    _settle(model)
    config: Any = model.config
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)


def _save_generation(
    model: PreTrainedModel, source: str | None, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write the settings of `generate`, which ends answers at all tokens at which those of the training ended."""
    if not model.can_generate():
        return
    generation: Any = model.generation_config
    if source is not None:
        from transformers import GenerationConfig

        with suppress(OSError):
            generation = GenerationConfig.from_pretrained(source)
    named: int | list[int] | None = generation.eos_token_id
    listed = named if isinstance(named, list) else [] if named is None else [named]
    stops = list(dict.fromkeys((*listed, *stop_token_ids(tokenizer, source))))
    if len(stops) > len(listed):
        generation.eos_token_id = stops if len(stops) > 1 else stops[0]
    generation.save_pretrained(folder)
