"""The KV cache of one attention layer, for transformers."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUntypedBaseClass=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

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
            key_states, value_states = _in_rows(key_states, lanes), _in_rows(value_states, lanes)
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


def _in_rows(states: Tensor, lanes: Lanes) -> Tensor:
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
