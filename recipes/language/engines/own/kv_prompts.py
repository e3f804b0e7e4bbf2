"""Keys and values of prompts, each stored once for all of its answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipes.language.engines.own.cache_shape import CacheShape
from recipes.language.engines.own.kv_rows import gathered
from recipes.training.typed_tensors import integers

Tokens = tuple[int, ...]


class KvPrompts:
    """Keys and values of prompts of similar lengths, flush left.

    Attributes:
        lengths: int64 [n], tokens of each prompt, on the CPU.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.lengths = torch.empty(0, dtype=torch.int64)
        self._tokens: list[Tokens] = []
        # Whether a row that enters may share each prompt: those of earlier weights serve the rows alone that have them.
        self._is_current: list[bool] = []
        self._keys = [shape.empty(0, 0, shape.dim) for _ in range(shape.layers)]
        self._values = [shape.empty(0, 0, shape.value_dim) for _ in range(shape.layers)]

    @property
    def count(self) -> int:
        """Prompts that it holds."""
        return len(self._tokens)

    @property
    def columns(self) -> int:
        """Columns that there is memory for: tokens of the longest prompt."""
        return self._keys[0].shape[2]

    def numbers(self) -> dict[Tokens, int]:
        """Return the number of each prompt that rows may share, by its tokens."""
        return {tokens: number for number, tokens in enumerate(self._tokens) if self._is_current[number]}

    def close(self) -> None:
        """Let no further row share the prompts: the weights that computed them are gone."""
        self._is_current = [False] * self.count

    def add(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], prompts: Sequence[Tokens], sources: Sequence[Tensor]
    ) -> None:
        """Append prompts.

        Args:
            keys, values: the keys and values, for each layer, float [heads, T, dim] of a packed row of tokens.
            prompts: token ids.
            sources: the sources, for each prompt, int64 [its length], the positions of its tokens in the packed row.
        """
        held = self.count
        # Padding repeats the first token of the row: a mask hides it, but it must not be NaN.
        laid = torch.nn.utils.rnn.pad_sequence(list(sources), batch_first=True).to(self.shape.device)
        columns = max(self.columns, laid.shape[1])
        for tensors, packed in ((self._keys, keys), (self._values, values)):
            for layer, old in enumerate(tensors):
                new = self.shape.empty(held + len(prompts), columns, old.shape[-1])
                new[:held, :, old.shape[2] :] = 0
                new[held:, :, laid.shape[1] :] = 0
                new[:held, :, : old.shape[2]] = old
                new[held:, :, : laid.shape[1]] = gathered(packed[layer], laid)
                tensors[layer] = new
        self._tokens += prompts
        self._is_current += [True] * len(prompts)
        self._measure()

    def keep(self, numbers: Tensor) -> None:
        """Keep these prompts, int64 [n] on the CPU, in this order."""
        kept = integers(numbers)
        self._tokens = [self._tokens[number] for number in kept]
        self._is_current = [self._is_current[number] for number in kept]
        self._measure()
        columns = int(self.lengths.max()) if self._tokens else 0
        taken = numbers.to(self.shape.device)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                tensors[layer] = old[:, :, :columns].index_select(0, taken)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, float [prompts, heads, columns, dim]."""
        return self._keys[layer], self._values[layer]

    def _measure(self) -> None:
        self.lengths = torch.tensor([len(tokens) for tokens in self._tokens], dtype=torch.int64)
