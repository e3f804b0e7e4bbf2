"""Weights in a folder that need a decision: tied tensors, non-finite values, and names beneath adapters.

A transformers class ties its embeddings to its output layer if `tie_word_embeddings` says so. If the two tensors in a
folder differ, as after merging an adapter of the output layer, the model uses both: transformers loads it so, and so
does all code here, since whoever builds a model of a folder calls `settle_ties`.

Non-finite values come from a failed copy or a diverged training.
"""

# transformers is largely untyped.
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

# Numbers that are compared at a time.
_PIECE: Final = 1 << 22
_FLAG: Final = "tie_word_embeddings"


class NamedTensors(NamedTuple):
    """Stored tensors by the names of a model.

    Attributes:
        tensors: the tensors that are one weight of the model each.
        complete: whether these are all tensors; if not, transformers combines several into a weight.
    """

    tensors: dict[str, StoredTensor]
    complete: bool


def settle_ties(model: PreTrainedModel, folder: str) -> None:
    """Untie weights that a model ties and its folder stores with unequal values, and note that in its configuration.

    Weights that the folder stores under one name only, or with equal values, stay tied. Two that differ only beyond the
    precision of the loaded type are untied, too: a folder has the same weights in every type.

    Args:
        model: a model of the folder, loaded or without memory; is changed in place.
        folder: see `stored_tensors`.
    """
    # Each tied name, with the name of its source according to the configuration.
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
    # The flag covers all tied weights, so that all are untied: a folder written later stores each of them.
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
    """Return all names of each weight, by its first name.

    Args:
        state: the weights by all their names, from a model's `state_dict(keep_vars=True)`.
    """
    names: dict[int, list[str]] = {}
    for name, weight in state.items():
        names.setdefault(id(weight), []).append(name)
    return {first: (first, *others) for first, *others in names.values()}


def by_names_of_model(model: PreTrainedModel, tensors: Mapping[str, StoredTensor]) -> NamedTensors:
    """Return stored tensors under the names that transformers gives them in a model."""
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
    """Return whether two stored tensors have equal values; only a piece of each is in memory at a time."""
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
    """Check that loaded weights are finite.

    Args:
        weights: the weights by name; weights without floating-point numbers or without memory are skipped.
        source: the file or folder of the weights.

    Raises:
        ConfigError: a weight holds a NaN or an infinity.
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
    # The sum needs no memory, and is finite only if all numbers are. It may overflow although they are.
    return bool(torch.isfinite(weight.sum(dtype=torch.float32))) or bool(torch.isfinite(weight).all())


_ADAPTER: Final = re.compile(r"\.lora_[A-Za-z_]+\.")
# The parts that peft inserts into the names of existing weights.
_ADDED: Final = re.compile(r"base_model\.model\.|(?<=\.)base_layer\.")
# The same for a network that is the first entry of a list, not a transformers model.
_ADDED_TO_LIST: Final = re.compile(r"base_model\.model\.0\.|(?<=\.)base_layer\.")


def beneath_adapters(own: Iterable[str], theirs: Collection[str]) -> dict[str, str]:
    """Match the names of a model's weights to given names, and return the given name of each match.

    Args:
        own: the names of the model's weights.
        theirs: the names of given weights; if none of them is an adapter's, they are matched to the weights beneath the
            model's adapters.
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
    """Return a model's adapter weights if the loaded weights have no adapters; those keep their initial values."""
    if any(_ADAPTER.search(name) for name in theirs):
        return set()
    return {name for name in own if _ADAPTER.search(name)}
