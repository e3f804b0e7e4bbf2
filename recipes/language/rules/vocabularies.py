"""Comparison of the tokens of two tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from recipes.sections.model_folders import read_object


def vocabulary_difference(one: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """Return how the tokens of two tokenizers differ, with an example; None where each has the same id in both."""
    unlike = [token for token in {**one, **other} if one.get(token) != other.get(token)]
    if not unlike:
        return None
    first = min(unlike, key=lambda token: (one.get(token, len(one)), token))
    ids = ["none" if token_id is None else str(token_id) for token_id in (one.get(first), other.get(first))]
    return f"{len(unlike)} tokens have other ids; the first, {first!r}, has {ids[0]} and {ids[1]}"


def stored_vocabulary(folder: Path) -> Mapping[str, int]:
    """Return the tokens in a folder's tokenizer.json with their ids; empty if they cannot be read."""
    written = read_object(folder / "tokenizer.json")
    model, added = written.get("model"), written.get("added_tokens")
    vocabulary = cast("Mapping[str, Any]", model).get("vocab") if isinstance(model, dict) else None
    tokens: dict[str, Any] = {}
    if isinstance(vocabulary, dict):
        tokens |= cast("dict[str, Any]", vocabulary)
    elif isinstance(vocabulary, list):
        # Of unigram models: tokens with scores, in the order of their ids.
        for number, entry in enumerate(cast("list[list[Any]]", vocabulary)):
            if isinstance(entry, list) and entry:  # pyright: ignore[reportUnnecessaryIsInstance] - read from outside
                tokens[str(entry[0])] = number
    for token in cast("list[Any]", added) if isinstance(added, list) else ():
        if isinstance(token, dict):
            fields = cast("dict[str, Any]", token)
            tokens[str(fields.get("content"))] = fields.get("id")
    return {token: number for token, number in tokens.items() if type(number) is int}
