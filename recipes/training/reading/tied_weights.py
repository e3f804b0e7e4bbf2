"""Weights of a folder that need a decision: shared tensors, values that are no numbers, names below adapters.

A class of transformers shares its embeddings with its output layer where `tie_word_embeddings` says so. A folder whose
two tensors differ, as after an adapter of the output layer was merged, is computed with both: so transformers loads it,
and so does everything here, because whoever builds a model of a folder asks `settle_ties`.

Values that are no numbers come from a copy that went wrong, or a training that had diverged.
"""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from recipes.training.tensor_files import StoredTensor, stored_tensors
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Numbers that are compared at once.
_PIECE: Final = 1 << 22
_FLAG: Final = "tie_word_embeddings"


class NamedTensors(NamedTuple):
    """Stored tensors by the names of a model.

    Attributes:
        tensors: those that are one weight of the model.
        complete: whether that is all of them: transformers makes no weight of several.
    """

    tensors: dict[str, StoredTensor]
    complete: bool


def settle_ties(model: PreTrainedModel, folder: str) -> None:
    """Part the weights that a model shares and its folder holds unequal values of, and note that in its configuration.

    Weights of which the folder holds one name alone, or equal values, stay shared. Two that differ only beyond the
    type that they were loaded in are parted, too: every type of one folder has the same weights.

    Args:
        model: a model of the folder, loaded or without memory; is changed in place.
        folder: see `stored_tensors`.
    """
    # Each name with the one whose tensor the configuration says it has.
    ties: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    if not ties:
        return
    shared = {name for name, source in ties.items() if _weight(model, name) is _weight(model, source)}
    parts = len(shared) < len(ties)
    stored = stored_tensors(Path(folder)) if shared else None
    if stored is not None:
        named = by_names_of_model(model, stored).tensors
        parts = parts or any(
            name in named and ties[name] in named and not _equal(named[name], named[ties[name]]) for name in shared
        )
    if not parts:
        return
    # One flag is that of all: a folder that is written later holds each of them.
    for name in shared:
        place, _, leaf = name.rpartition(".")
        weight = _weight(model, name)
        own = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
        setattr(model.get_submodule(place), leaf, own)
    model.all_tied_weights_keys = {}
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        for about in (config, config.get_text_config()) if hasattr(config, "get_text_config") else ():
            if getattr(about, _FLAG, False):
                setattr(about, _FLAG, False)


def names_of_one_tensor(state: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Return all names of each weight, by the first of them.

    Args:
        state: the weights by all of their names, as `state_dict(keep_vars=True)` of a model returns them.
    """
    names: dict[int, list[str]] = {}
    for name, weight in state.items():
        names.setdefault(id(weight), []).append(name)
    return {first: (first, *others) for first, *others in names.values()}


def by_names_of_model(model: PreTrainedModel, tensors: Mapping[str, StoredTensor]) -> NamedTensors:
    """Return stored tensors by the names that transformers gives them in a model."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return NamedTensors({}, complete=False)
    rules = get_model_conversion_mapping(model)
    renamings: list[Any] = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters: list[Any] = [rule for rule in rules if isinstance(rule, WeightConverter)]
    complete = len(renamings) + len(converters) == len(rules)
    own, named = model.state_dict(), dict[str, StoredTensor]()
    for name, tensor in tensors.items():
        renamed, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if converter is not None or renamed in named:
            complete = False
        else:
            named[renamed] = tensor
    return NamedTensors(named, complete)


def _weight(model: nn.Module, name: str) -> Tensor:
    place, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(place), leaf)


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two stored tensors have equal values; no more than a piece of either is in memory."""
    if one.shape != other.shape:
        return False
    dtype = torch.promote_types(one.dtype, other.dtype)
    rows = one.shape[0] if one.shape else 1
    step = max(1, _PIECE * rows // max(1, torch.Size(one.shape).numel()))
    for start in range(0, rows, step):
        count = min(step, rows - start)
        if not torch.equal(one.rows(start, count).to(dtype), other.rows(start, count).to(dtype)):
            return False
    return True


def require_finite(weights: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Check that weights that were read are finite.

    Args:
        weights: the weights by name; those that hold no floating-point numbers, or have no memory, are passed over.
        source: the file or folder that they are from.

    Raises:
        ConfigError: one holds a NaN or an infinity.
    """
    for name, weight in weights:
        if weight.is_meta or not weight.is_floating_point() or _is_finite(weight.detach()):
            continue
        count = int((~torch.isfinite(weight.detach())).sum())
        raise ConfigError(
            f"the weights in `{source}` hold values that are no finite numbers",
            why=f"`{name}` has {count} of {weight.numel()}, NaN or infinite",
            help="copy the file again from its source; if it came from a training, that training had diverged:"
            " take an earlier checkpoint",
        )


def _is_finite(weight: Tensor) -> bool:
    # The sum needs no memory, and is finite only where all numbers are. It may be too large where they are.
    return bool(torch.isfinite(weight.sum(dtype=torch.float32))) or bool(torch.isfinite(weight).all())


_ADAPTER: Final = re.compile(r"\.lora_[A-Za-z_]+\.")
# What peft puts into the names of the weights that it finds.
_ADDED: Final = re.compile(r"base_model\.model\.|(?<=\.)base_layer\.")
# The same where a network that was not a model of transformers is the first of a list.
_ADDED_TO_LIST: Final = re.compile(r"base_model\.model\.0\.|(?<=\.)base_layer\.")


def beneath_adapters(own: Iterable[str], theirs: Collection[str]) -> dict[str, str]:
    """Return the names of a model's weights that are among others, each with its name there.

    Args:
        own: the names of the model's weights.
        theirs: the names of weights that are given to it; where none of them is an adapter's, they are found beneath
            the model's adapters.
    """
    plain = not any(_ADAPTER.search(name) for name in theirs)
    matches: dict[str, str] = {}
    for name in own:
        candidates = (name, _ADDED.sub("", name), _ADDED_TO_LIST.sub("", name)) if plain else (name,)
        matching = next((candidate for candidate in candidates if candidate in theirs), None)
        if matching is not None:
            matches[name] = matching
    return matches


def new_adapters(own: Iterable[str], theirs: Iterable[str]) -> set[str]:
    """Return the adapter weights of a model that keep their initial values, because the loaded weights have none."""
    if any(_ADAPTER.search(name) for name in theirs):
        return set()
    return {name for name in own if _ADAPTER.search(name)}
