"""Keys and values of tokens: the cache of an attention layer for transformers, and the forward passes that fill it."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer

from recipes.language.models.architecture import takes_masks
from recipes.training.huggingface import cache_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Keys and values, float [rows, heads, columns, dim] each.
KeyValues: TypeAlias = tuple[Tensor, Tensor]

# The minimum growth of memory, in columns.
_GROWTH = 64


class Lanes(NamedTuple):
    """Rows that share tokens, as queries of one row, so that the shared tokens are read once for all.

    Attributes:
        rows: int64 [stems * count], the row of each query; row 0 fills up stems with fewer rows.
        places: int64 [rows], the query of each row.
        count: queries of each stem.
    """

    rows: Tensor
    places: Tensor
    count: int

    def laid(self, rows: Tensor) -> Tensor:
        """Return `rows`, [rows, ...], as queries, [stems, count, ...]."""
        return cast("Tensor", rows.index_select(0, self.rows).unflatten(0, (-1, self.count)))


class KvLayer(DynamicLayer):
    """Keys and values of rows: shared tokens, stored once, followed by each row's own tokens.

    transformers' layer copies everything for each new token; this layer writes into allocated memory.

    Attributes:
        most: the maximum columns of own tokens, beyond which no memory is allocated in advance.
        stems: keys and values of shared tokens, one row per stem; None: no stems.
        owners: int64 [rows], the stem of each row.
        lanes: the layout of the rows in the model's next pass; None: a row each.
        end: the columns of own tokens so far.
    """

    def __init__(self, stems: KeyValues | None = None) -> None:
        super().__init__()
        self.most = self.end = 0
        self.stems = stems
        self.owners = torch.empty(0, dtype=torch.int64)
        self.lanes: Lanes | None = None

    @property
    def own(self) -> KeyValues:
        """Keys and values of own tokens."""
        keys, values = cast("KeyValues", (self.keys, self.values))
        return keys[:, :, : self.end], values[:, :, : self.end]

    @property
    def tensors(self) -> list[Tensor]:
        """The allocated memory."""
        own = () if self.keys is None else cast("KeyValues", (self.keys, self.values))
        return [*own, *(self.stems or ())]

    def get_seq_length(self, *_: Any) -> int:
        """See `DynamicLayer`: columns of shared and own tokens."""
        return self.end + (0 if self.stems is None else self.stems[0].shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> KeyValues:
        """See `DynamicLayer`: keep the keys and values of new tokens, and return those of all tokens."""
        lanes = self.lanes
        if lanes is not None:
            key_states, value_states = _as_rows(key_states, lanes), _as_rows(value_states, lanes)
        end = self.end + key_states.shape[2]
        if self.keys is None:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
        else:
            if end > self.keys.shape[2]:
                self.lay([self.own], end - self.end)
            for kept, states in zip((self.keys, self.values), (key_states, value_states), strict=True):
                cast("Tensor", kept)[:, :, self.end : end] = states
        self.end = end
        if self.stems is None:
            return self.own
        return self._behind(self.stems[0], self.own[0]), self._behind(self.stems[1], self.own[1])

    def _behind(self, stems: Tensor, own: Tensor) -> Tensor:
        if self.lanes is not None:
            # From [stems, queries, heads, columns, dim]: the own tokens of all rows become columns of their stem.
            return torch.cat((stems, self.lanes.laid(own).transpose(1, 2).flatten(2, 3)), dim=2)
        of_rows = stems.index_select(0, self.owners) if len(stems) > 1 else stems.expand(len(own), -1, -1, -1)
        return torch.cat((of_rows, own), dim=2)

    def lay(self, parts: Sequence[KeyValues], growth: int = 0) -> None:
        """Copy rows into new memory, flush right, with room for further columns.

        Args:
            parts: keys and values of the rows, in parts to be concatenated.
            growth: the number of further columns that must fit.
        """
        width = max(keys.shape[2] for keys, _ in parts)
        columns = max(width + growth, min(width + max(_GROWTH, width // 2), self.most))
        self.keys, self.values = (_laid(tensors, width, columns) for tensors in zip(*parts, strict=True))
        self.end, self.is_initialized = width, True


def _as_rows(states: Tensor, lanes: Lanes) -> Tensor:
    """Return the states of a pass over lanes, [stems, heads, queries, dim], as rows, [rows, heads, 1, dim]."""
    return states.transpose(1, 2).flatten(0, 1).index_select(0, lanes.places)[:, :, None]


def _laid(parts: Sequence[Tensor], width: int, columns: int) -> Tensor:
    _, heads, _, dim = parts[0].shape
    laid = parts[0].new_empty(sum(map(len, parts)), heads, columns, dim)
    first = 0
    for part in parts:
        rows, before = laid[first : first + len(part)], width - part.shape[2]
        # Zero all masked memory: attention multiplies it by 0, and NaN times 0 is NaN.
        rows[:, :, :before] = 0
        rows[:, :, before:width] = part
        first += len(part)
    return laid


Tokens = tuple[int, ...]

# Contexts are put into one row of at most this many times the prefix: each attends over the others' tokens.
_MOST_OTHERS = 2


@dataclass(frozen=True, slots=True)
class Prefix:
    """A common prefix of contexts, with its keys and values.

    Attributes:
        tokens: the token ids of the prefix; empty if nothing is shared.
        layers: keys and values of each layer, one row.
    """

    tokens: Tokens = ()
    layers: Sequence[KeyValues] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """The memory of keys and values."""
        return [tensor for layer in self.layers for tensor in layer]

    def begins(self, context: Tokens) -> bool:
        """Return whether a context starts with the prefix and continues after it."""
        return len(context) > len(self.tokens) and context[: len(self.tokens)] == self.tokens


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Keys and values of contexts, one row each.

    Attributes:
        logits: float [contexts, V], logits of the token after each context.
        layers: keys and values of each layer after the prefix, flush right.
        mask: int64 [contexts, columns], 1 where there is a token.
        prefix: the common prefix of all contexts.
    """

    logits: Tensor
    layers: Sequence[KeyValues]
    mask: Tensor
    prefix: Prefix

    def behind(self, which: Tensor) -> tuple[list[KeyValues], Tensor]:
        """Return keys and values of the contexts `which` after the prefix, with their mask."""
        layers = [(keys.index_select(0, which), values.index_select(0, which)) for keys, values in self.layers]
        return layers, self.mask.index_select(0, which)

    def whole(self, which: Tensor) -> tuple[list[KeyValues], Tensor]:
        """Return keys and values of the contexts `which` with the prefix, and their mask."""
        layers, mask = self.behind(which)
        if not self.prefix.tokens:
            return layers, mask
        count = len(which)
        whole = [
            (
                torch.cat((first[0].expand(count, -1, -1, -1), own[0]), dim=2),
                torch.cat((first[1].expand(count, -1, -1, -1), own[1]), dim=2),
            )
            for first, own in zip(self.prefix.layers, layers, strict=True)
        ]
        return whole, pad(mask, (len(self.prefix.tokens), 0), value=1)


class ForwardPass:
    """The forward passes of a model that extend a KV cache.

    Args:
        model: a causal language model from transformers.

    Attributes:
        takes_masks: whether the model accepts a mask of the columns that each token sees.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._takes = frozenset(inspect.signature(self._model.forward).parameters)
        self._cache = cache_name(self._model.forward)
        self.takes_masks = takes_masks(model)

    @property
    def takes_positions(self) -> bool:
        """Whether the model accepts positions of tokens, instead of counting columns."""
        return "position_ids" in self._takes

    @cached_property
    def bytes_per_token(self) -> int:
        """Memory of the keys and values of a token, in bytes."""
        return sum(tensor.nbytes for tensor in self.prefix((0,)).tensors)

    def logits(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor, cache: Any, wanted: Tensor | None = None
    ) -> Tensor:
        """Return the logits after the last of `tokens`, float [rows, V], and append their keys and values to a cache.

        Args:
            tokens: int64 [rows, n].
            mask: int64 [rows, columns], 1 where the cache and then `tokens` have a token; None: everywhere. Or bool
                [rows, 1, n, columns], whether each of `tokens` sees a column.
            positions: int64 [rows, n], positions of `tokens` in their sequences.
            cache: the cache of the rows.
            wanted: int64 [k], the columns of `tokens` after which logits are wanted, so that the result is [rows * k,
                V]; None: the last column.
        """
        arguments: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1 if wanted is None else wanted}
        taken = {name: value for name, value in arguments.items() if name in self._takes}
        taken[self._cache] = cache
        logits = self._model(input_ids=tokens, attention_mask=mask, use_cache=True, **taken).logits
        if wanted is None:
            return logits[:, -1]
        return (logits if "logits_to_keep" in taken else logits[:, wanted]).flatten(0, 1)

    def prefix(self, tokens: Tokens) -> Prefix:
        """Return the prefix of these tokens, with keys and values."""
        cache = _new_cache()
        row = torch.tensor([tokens], device=self._model.device)
        self.logits(row, None, torch.arange(len(tokens), device=row.device)[None], cache)
        return Prefix(tokens, [layer.own for layer in cache.layers])

    def prefilled(self, contexts: Sequence[Tokens], prefix: Prefix) -> Prefilled:
        """Return keys and values of contexts, which all begin with a prefix and continue after it."""
        known, device = len(prefix.tokens), self._model.device
        width = max(map(len, contexts)) - known
        tokens = torch.zeros(len(contexts), width, dtype=torch.int64)
        mask = torch.ones(len(contexts), width, dtype=torch.int64)
        for row, context in enumerate(contexts):
            padding = width - (len(context) - known)
            tokens[row, padding:] = torch.tensor(context[known:])
            mask[row, :padding] = 0
        positions = (known + mask.cumsum(1) - 1).clamp(min=0)
        cache = _new_cache(prefix)
        tokens, mask, positions = tokens.to(device), mask.to(device), positions.to(device)
        if self.takes_masks and len(contexts) * width <= _MOST_OTHERS * known:
            logits = self._at_once(tokens, mask, positions, cache)
            own = [layer.own for layer in cache.layers]
            layers = [(_in_rows(keys, len(contexts)), _in_rows(values, len(contexts))) for keys, values in own]
            return Prefilled(logits, layers, mask, prefix)
        seen = None if bool(mask.all()) else pad(mask, (known, 0), value=1)
        logits = self.logits(tokens, seen, positions, cache)
        return Prefilled(logits, [layer.own for layer in cache.layers], mask, prefix)

    def _at_once(self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Return the logits after rows of tokens, which are put into one row, so that their prefix is read once."""
        rows, width = tokens.shape
        ones = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()
        same = torch.eye(rows, dtype=torch.bool, device=tokens.device)
        seen = same[:, None, :, None] & ones[None, :, None, :] & mask.bool()[None, None]
        seen = pad(seen.reshape(rows * width, rows * width), (cache.get_seq_length(), 0), value=True)
        wanted = torch.arange(1, rows + 1, device=tokens.device) * width - 1
        return self.logits(tokens.reshape(1, -1), seen[None, None], positions.reshape(1, -1), cache, wanted)


def _in_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return keys or values [1, heads, rows * columns, dim] as [rows, heads, columns, dim]."""
    return tensor[0].unflatten(1, (rows, -1)).transpose(0, 1)


def _new_cache(prefix: Prefix | None = None) -> Any:
    """Return a cache that has only the prefix, which all rows share."""
    if prefix is None or not prefix.tokens:
        return Cache(layer_class_to_replicate=KvLayer)
    return Cache(layers=[KvLayer(layer) for layer in prefix.layers])
