"""Keys and values of sequences that are being generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from recipes.language.models.attention import PackedPlan
from recipes.language.models.attention_rule import AttentionRule, attention

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
        dtype, device: of the tensors.
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


class KvCache:
    """Keys and values of many sequences, one row each, that end at a common column.

    Sequences of unlike length stand flush right: the next token of every row goes to column `end`, so that one slice
    takes all of them, and a mask hides what stands before a row's first column. A row is given up by leaving it out of
    `keep`; the rest is copied together at once.

    Attributes:
        end: column of the next token.
        starts: int64 [rows], first column of each row.
        moves: how often rows or columns have got other memory.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.end = 0
        self.moves = 0
        self.starts = torch.empty(0, dtype=torch.int64, device=shape.device)
        self._keys = [_empty(shape, 0, 0, shape.dim) for _ in range(shape.layers)]
        self._values = [_empty(shape, 0, 0, shape.value_dim) for _ in range(shape.layers)]

    @property
    def rows(self) -> int:
        """Sequences that it holds."""
        return len(self.starts)

    @property
    def columns(self) -> int:
        """Columns that there is memory for."""
        return self._keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Memory that is taken, in bytes."""
        return self.rows * self.columns * self.shape.bytes_per_token

    def keep(self, rows: Tensor, most: int) -> None:
        """Keep these rows, int64 [n], in this order, and free columns that none of them uses.

        Args:
            rows: to keep.
            most: tokens that none of them will come to more than.
        """
        starts = self.starts[rows]
        first = int(starts.min()) if len(rows) else self.end
        width = self.end - first
        columns = _columns(width, self.shape.growth, most)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                new = _empty(self.shape, len(rows), columns, old.shape[-1])
                new[:, :, :width] = old[:, :, first : self.end].index_select(0, rows)
                tensors[layer] = new
        self.starts = starts - first
        self.end = width
        self.moves += 1

    def add(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], sources: Tensor, lengths: Tensor, most: int
    ) -> None:
        """Append rows.

        Args:
            keys, values: for each layer, float [heads, T, dim] of a packed row of tokens.
            sources: int64 [n, width], for each new row the positions in the packed row, flush right.
            lengths: int64 [n], how many of them count.
            most: tokens that no row, old or new, will come to more than.
        """
        count, width = sources.shape
        move = max(width - self.end, 0)  # a prompt longer than what any row holds: all others move right
        end = self.end + move
        columns = max(self.columns, _columns(end, self.shape.growth, most))
        for tensors, packed in ((self._keys, keys), (self._values, values)):
            for layer, old in enumerate(tensors):
                new = _empty(self.shape, self.rows + count, columns, old.shape[-1])
                # What a mask hides is multiplied by 0, and NaN times 0 is NaN: no memory is left as it was found.
                new[: self.rows, :, :move] = 0
                new[self.rows :, :, : end - width] = 0
                new[: self.rows, :, move:end] = old[:, :, : self.end]
                taken = packed[layer].index_select(1, sources.reshape(-1))
                laid = taken.reshape(-1, count, width, taken.shape[-1]).transpose(0, 1)
                new[self.rows :, :, end - width : end] = laid
                tensors[layer] = new
        self.starts = torch.cat((self.starts + move, end - lengths.to(self.starts)))
        self.end = end
        self.moves += 1

    def reserve(self, most: int) -> None:
        """Grow by one column; no row will have more than `most` tokens."""
        if self.end < self.columns:
            return
        columns = _columns(self.end, max(self.shape.growth, self.columns // 2), most)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                new = _empty(self.shape, self.rows, columns, old.shape[-1])
                new[:, :, : self.end] = old[:, :, : self.end]
                tensors[layer] = new
        self.moves += 1

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, float [rows, heads, columns, dim], for writing, too."""
        return self._keys[layer], self._values[layer]


class DecodePlan:
    """Attention of one new token for every row of a cache, which keeps the token's keys and values.

    Attributes:
        positions: int64 [rows, 1], the position of each new token in its sequence.
    """

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._first = int(cache.starts.min()) if cache.rows else 0
        self.positions = (cache.end - cache.starts)[:, None]
        self._ragged = bool((cache.starts != self._first).any()) if cache.rows else False
        self._masks: dict[int | None, Tensor | None] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """See `AttentionPlan`; T is 1. Query heads that share a key head are taken as rows of one product."""
        cache = self._cache
        kept_keys, kept_values = cache.layer(layer)
        kept_keys[:, :, cache.end] = keys[:, :, 0]
        kept_values[:, :, cache.end] = values[:, :, 0]
        rows, heads, _, dim = queries.shape
        seen = slice(self._first, cache.end + 1)
        window = rule.window if rule.hides(cache.end + 1 - self._first) else None
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        mask = self._masks[window]
        if rule.is_plain:
            queries = queries.reshape(rows, keys.shape[1], heads // keys.shape[1], dim)
        result = attention(queries, kept_keys[:, :, seen], kept_values[:, :, seen], mask, rule)
        return result.reshape(rows, heads, 1, values.shape[-1])

    def _mask(self, window: int | None) -> Tensor | None:
        """Return the columns that each row's new token sees, bool [rows, 1, 1, columns]; None: all."""
        cache = self._cache
        if window is None and not self._ragged:
            return None
        columns = torch.arange(self._first, cache.end + 1, device=cache.starts.device)
        seen = columns[None] >= cache.starts[:, None]
        if window is not None:
            seen &= cache.end - columns[None] < window
        return seen[:, None, None]


class StaticDecodePlan:
    """A `DecodePlan` whose operations are the same at every step while the cache keeps its memory, for a CUDA graph.

    All columns of the cache are read, and a mask hides those that have no tokens yet.

    Attributes:
        positions: as of `DecodePlan`; of the step at which it was made.
    """

    def __init__(self, cache: KvCache, end: Tensor) -> None:
        """`end` is int64 [1], the column of the new tokens, which the caller keeps up to date."""
        self._cache = cache
        self._end = end
        self._columns = torch.arange(cache.columns, device=end.device)
        self.positions = (end - cache.starts)[:, None]
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """See `DecodePlan.attend`."""
        kept_keys, kept_values = self._cache.layer(layer)
        kept_keys.index_copy_(2, self._end, keys)
        kept_values.index_copy_(2, self._end, values)
        rows, heads, _, dim = queries.shape
        if rule.window not in self._masks:
            self._masks[rule.window] = self._mask(rule.window)
        if rule.is_plain:
            queries = queries.reshape(rows, keys.shape[1], heads // keys.shape[1], dim)
        result = attention(queries, kept_keys, kept_values, self._masks[rule.window], rule)
        return result.reshape(rows, heads, 1, values.shape[-1])

    def _mask(self, window: int | None) -> Tensor:
        columns = self._columns[None]
        seen = (columns >= self._cache.starts[:, None]) & (columns <= self._end)
        if window is not None:
            seen &= self._end - columns < window
        return seen[:, None, None]


def _empty(shape: CacheShape, rows: int, columns: int, dim: int) -> Tensor:
    """Return memory for keys or values; zeros on a GPU, where `StaticDecodePlan` reads behind the newest column."""
    make = torch.zeros if shape.device.type == "cuda" else torch.empty
    return make(rows, shape.heads, columns, dim, dtype=shape.dtype, device=shape.device)


def _columns(end: int, growth: int, most: int) -> int:
    """Return how many columns to make room for: some beyond `end`, but one is enough beyond `most`.

    Memory that no token comes to costs its allocation all the same: the kernel clears pages that rows share.
    """
    return max(end + 1, min(end + growth, most))


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Keys and values of tokens that prompts share as a prefix.

    Attributes:
        tokens: their ids; none where nothing is shared.
        keys, values: for each layer, float [heads, P, dim].
    """

    tokens: tuple[int, ...] = ()
    keys: Sequence[Tensor] = ()
    values: Sequence[Tensor] = ()

    def begins(self, prompt: tuple[int, ...]) -> bool:
        """Return whether a prompt starts with the tokens and continues after them."""
        return len(prompt) > len(self.tokens) and prompt[: len(self.tokens)] == self.tokens


class PrefillPlan:
    """Attention of a packed row of prompts that also keeps each layer's keys and values.

    Args:
        plan: the whole row.
        layers: of the model.
        known: what the row begins with, where its keys and values are there already: the forward pass takes the tokens
            after it alone.

    Attributes:
        positions: int64 [1, T], positions of the tokens of the forward pass in their sequences.
        keys, values: for each layer, float [heads, P + T, dim], after the forward pass.
    """

    def __init__(self, plan: PackedPlan, layers: int, known: SharedPrefix | None = None) -> None:
        self._plan = plan
        self._known = known
        self._first = len(known.tokens) if known else 0
        self.positions = plan.positions[:, self._first :]
        self.keys: list[Tensor] = [torch.empty(0)] * layers
        self.values: list[Tensor] = [torch.empty(0)] * layers

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """See `AttentionPlan`; B is 1."""
        if self._known is not None:
            keys = torch.cat((self._known.keys[layer][None], keys), dim=2)
            values = torch.cat((self._known.values[layer][None], values), dim=2)
            # What known tokens attend to is of no use any more: any queries serve.
            queries = pad(queries, (0, 0, self._first, 0))
        self.keys[layer], self.values[layer] = keys[0], values[0]
        return self._plan.attend(layer, queries, keys, values, rule)[:, :, self._first :]

    def prefix(self, tokens: tuple[int, ...]) -> SharedPrefix:
        """Return keys and values of the first tokens of the row, after the forward pass."""
        count = len(tokens)
        return SharedPrefix(
            tokens, [key[:, :count].clone() for key in self.keys], [value[:, :count].clone() for value in self.values]
        )
