"""Keys and values of one attention layer, for the cache of transformers."""

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

# Columns that memory grows by at least.
_GROWTH = 64


class Lanes(NamedTuple):
    """Rows that share tokens as queries of one row: these tokens are then read once for all of them.

    Attributes:
        rows: int64 [stems * count], the row of each query; those of a stem with fewer rows are filled up with row 0.
        places: int64 [rows], the query of each row.
        count: queries of each stem.
    """

    rows: Tensor
    places: Tensor
    count: int

    def laid(self, rows: Tensor) -> Tensor:
        """Return [stems, count, ...] of [rows, ...]."""
        return cast("Tensor", rows.index_select(0, self.rows).unflatten(0, (-1, self.count)))


class KvLayer(DynamicLayer):
    """Keys and values of rows: of tokens that several rows share, once, and after them of each row's own.

    The layer of transformers copies everything for each new token; this one writes it into allocated memory.

    Attributes:
        most: columns of own tokens that rows come to at most, beyond which no memory is taken.
        stems: keys and values of what rows share, a row for each; None: nothing.
        owners: int64 [rows], the stem of each row.
        lanes: the rows as the model's next pass has them; None: one by one.
        end: columns of own tokens.
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
        """The memory that is taken."""
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
            # [stems, queries, heads, columns, dim]: the tokens of all rows are columns of their stem.
            return torch.cat((stems, self.lanes.laid(own).transpose(1, 2).flatten(2, 3)), dim=2)
        of_rows = stems.index_select(0, self.owners) if len(stems) > 1 else stems.expand(len(own), -1, -1, -1)
        return torch.cat((of_rows, own), dim=2)

    def lay(self, parts: Sequence[KeyValues], growth: int = 0) -> None:
        """Put rows one under another into new memory, all of them flush right, with room for further columns.

        Args:
            parts: the rows.
            growth: columns that there must be room for.
        """
        width = max(keys.shape[2] for keys, _ in parts)
        columns = max(width + growth, min(width + max(_GROWTH, width // 2), self.most))
        self.keys, self.values = (_laid(tensors, width, columns) for tensors in zip(*parts, strict=True))
        self.end, self.is_initialized = width, True


def _in_rows(states: Tensor, lanes: Lanes) -> Tensor:
    """Return [rows, heads, 1, dim] of what a pass computes for lanes, [stems, heads, queries, dim]."""
    return states.transpose(1, 2).flatten(0, 1).index_select(0, lanes.places)[:, :, None]


def _laid(parts: Sequence[Tensor], width: int, columns: int) -> Tensor:
    _, heads, _, dim = parts[0].shape
    laid = parts[0].new_empty(sum(map(len, parts)), heads, columns, dim)
    first = 0
    for part in parts:
        rows, before = laid[first : first + len(part)], width - part.shape[2]
        # What a mask hides is multiplied by 0, and NaN times 0 is NaN: no memory is left as it was.
        rows[:, :, :before] = 0
        rows[:, :, before:width] = part
        first += len(part)
    return laid
