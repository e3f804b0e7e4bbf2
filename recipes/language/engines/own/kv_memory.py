"""Keys and values in memory: their sizes, those of running answers, one row each, and those of prompts, each once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recipes.language.models.attention_rule import AttentionRule
from recipes.training.typed_tensors import integers
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tokens = tuple[int, ...]

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
        dtype, device: the type and device of the tensors.
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

    def empty(self, rows: int, columns: int, dim: int) -> Tensor:
        """Return memory for keys or values; zeros on a GPU, where a recorded step reads behind the newest column."""
        make = torch.zeros if self.device.type == "cuda" else torch.empty
        return make(rows, self.heads, columns, dim, dtype=self.dtype, device=self.device)


def cache_shape(model: PreTrainedModel) -> CacheShape:
    """Return the sizes of the keys and values of a model that `use_plans` has prepared, by a pass of one token.

    Raises:
        ConfigError: its layers have keys and values of unlike sizes.
    """
    probe = _ShapeProbe()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        model(input_ids=token, position_ids=token, use_cache=False, attention_plan=probe)
    sizes = set(probe.sizes)
    if len(sizes) != 1:
        raise ConfigError(
            f"the layers of `{type(model).__name__}` have keys and values of different sizes, or none",
            help="use a model family listed in docs/language-models.md",
        )
    return CacheShape(len(probe.sizes), *sizes.pop(), model.dtype, model.device)


class _ShapeProbe:
    """A plan that records the sizes of the layers' keys and values: heads, and numbers per key and value."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int, int]] = []

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """See `AttentionPlan`."""
        self.sizes.append((keys.shape[1], keys.shape[-1], values.shape[-1]))
        return values.repeat_interleave(queries.shape[1] // values.shape[1], dim=1)


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
