"""Names of weights with and without the adapters of peft."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

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
