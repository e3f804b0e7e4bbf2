"""Keys and values of running answers, one row each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipes.language.engines.own.cache_shape import CacheShape


class KvRows:
    """Keys and values of many sequences, one row each, that end at a common column.

    Sequences of unlike length stand flush right: the next token of every row goes to column `end`, so that one slice
    takes all of them, and a mask hides what stands before a row's first column.

    Attributes:
        end: column of the next token.
        starts: int64 [rows], first column of each row, on the CPU.
        most: int64 [rows], tokens that each row comes to at most, on the CPU.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.end = 0
        self.starts = torch.empty(0, dtype=torch.int64)
        self.most = torch.empty(0, dtype=torch.int64)
        self._keys = [shape.empty(0, 0, shape.dim) for _ in range(shape.layers)]
        self._values = [shape.empty(0, 0, shape.value_dim) for _ in range(shape.layers)]

    @property
    def count(self) -> int:
        """Sequences that it holds."""
        return len(self.starts)

    @property
    def columns(self) -> int:
        """Columns that there is memory for."""
        return self._keys[0].shape[2]

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, int64 [n] on the CPU, in this order, and free columns that none of them uses."""
        starts = self.starts[rows]
        first = int(starts.min()) if len(rows) else self.end
        width = self.end - first
        self.most = self.most[rows]
        columns = self._room(width, self.shape.growth)
        taken = rows.to(self.shape.device)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                new = self.shape.empty(len(rows), columns, old.shape[-1])
                new[:, :, :width] = old[:, :, first : self.end].index_select(0, taken)
                tensors[layer] = new
        self.starts = starts - first
        self.end = width

    def add(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], sources: Tensor, lengths: Tensor, most: Tensor
    ) -> None:
        """Append rows.

        Args:
            keys, values: the keys and values, for each layer, float [heads, T, dim] of a packed row of tokens.
            sources: int64 [n, width], for each new row the positions in the packed row, flush right.
            lengths: int64 [n], how many of them count; on the CPU.
            most: int64 [n], tokens that each new row comes to at most; on the CPU.
        """
        count, width = sources.shape
        move = max(width - self.end, 0)  # a prompt longer than what any row holds: all others move right
        end = self.end + move
        held = self.count
        self.most = torch.cat((self.most, most))
        columns = max(self.columns, self._room(end, self.shape.growth))
        for tensors, packed in ((self._keys, keys), (self._values, values)):
            for layer, old in enumerate(tensors):
                new = self.shape.empty(held + count, columns, old.shape[-1])
                # What a mask hides is multiplied by 0, and NaN times 0 is NaN: no memory is left as it was found.
                new[:held, :, :move] = 0
                new[held:, :, : end - width] = 0
                new[:held, :, move:end] = old[:, :, : self.end]
                new[held:, :, end - width : end] = gathered(packed[layer], sources)
                tensors[layer] = new
        self.starts = torch.cat((self.starts + move, end - lengths))
        self.end = end

    def reserve(self) -> bool:
        """Make room for one more column, and return whether rows have got other memory for it."""
        if self.end < self.columns:
            return False
        columns = self._room(self.end, max(self.shape.growth, self.columns // 2))
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                new = self.shape.empty(self.count, columns, old.shape[-1])
                new[:, :, : self.end] = old[:, :, : self.end]
                tensors[layer] = new
        return True

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, float [rows, heads, columns, dim], for writing, too."""
        return self._keys[layer], self._values[layer]

    def _room(self, end: int, growth: int) -> int:
        """Return how many columns to make room for: some beyond `end`, but one is enough beyond what rows come to.

        Memory that no token comes to costs its allocation all the same: the kernel clears pages that rows share.
        """
        most = int(self.most.max()) if len(self.most) else 0
        return max(end + 1, min(end + growth, most))


def gathered(packed: Tensor, sources: Tensor) -> Tensor:
    """Return [n, heads, width, dim] of a packed row [heads, T, dim] at positions [n, width]."""
    count, width = sources.shape
    taken = packed.index_select(1, sources.reshape(-1))
    return taken.reshape(len(packed), count, width, taken.shape[-1]).transpose(0, 1)
