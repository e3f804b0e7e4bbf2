"""Packing of sequences into rows for a forward pass with transformers' attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.training.typed_tensors import integers, pieces

if TYPE_CHECKING:
    pass


# A shorter common prefix is not worth a mask.
MIN_SHARED = 4
# Sequences share one copy of their prefix while their own tokens are at most this many times the prefix: attention also
# computes each token's scores with the other sequences' tokens.
MOST_OTHERS = 4
# The maximum tokens of a row with several sequences: its mask has an entry for each pair of tokens.
WIDEST = 4096


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of packed sequences, padded on the right.

    Attributes:
        tokens: int64 [n, T], token ids.
        positions: int64 [n, T], position of each token in its sequence; None: its column, as a row is one sequence.
        mask: bool [n, 1, T, T], whether a token sees a column; None: all up to its own.
        predictors: int64 [A], place in [n * T] whose output predicts each target.
        targets: int64 [A], tokens to predict.
        longest: the length of the longest sequence.
    """

    tokens: Tensor
    positions: Tensor | None
    mask: Tensor | None
    predictors: Tensor
    targets: Tensor
    longest: int


def pack(batch: RolloutBatch, *, masks: bool = True, device: torch.device | str = "cpu") -> PackedRows:
    """Pack a batch into rows.

    Args:
        batch: the sequences, in any order.
        masks: see `RowLayout`.
        device: the device of the result.
    """
    sequences = [integers(row) for row in pieces(batch.tokens, integers(batch.lengths))]
    prompts = integers(batch.prompt_lengths)
    # The last token predicts nothing.
    layout = RowLayout([sequence[:-1] for sequence in sequences], masks=masks)
    predictors = [layout.places(number)[prompt - 1 :] for number, prompt in enumerate(prompts)]
    answers = [token for sequence, prompt in zip(sequences, prompts, strict=True) for token in sequence[prompt:]]
    return layout.rows(torch.cat(predictors), torch.tensor(answers, dtype=torch.int64), device)


class _Place(NamedTuple):
    """The place of a sequence in a row.

    Attributes:
        row: the row of the sequence.
        common: the number of tokens shared with other sequences.
        first, own: the columns of the first shared token and of the first own token.
        end: the column after all sequences that share the tokens.
    """

    row: int
    common: int
    first: int
    own: int
    end: int


class _Tree(NamedTuple):
    """Sequences, by number, with a common prefix that is stored once, and its length."""

    common: int
    members: list[int]
    size: int


class RowLayout:
    """The layout of sequences in rows.

    Args:
        sequences: the tokens of each sequence, at least one.
        masks: whether rows may have a mask. Then common prefixes are stored once, and short sequences share a row of
            up to `WIDEST` tokens; the model's results are the same.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], *, masks: bool) -> None:
        self._sequences = sequences
        self._longest = max(map(len, sequences))
        masks = masks and self._longest <= WIDEST
        alone = [_Tree(0, [number], len(sequence)) for number, sequence in enumerate(sequences)]
        trees = _trees(sequences) if masks else alone
        self._width = max(tree.size for tree in trees)
        self._places: dict[int, _Place] = {}
        taken: list[int] = []
        for tree in sorted(trees, key=lambda tree: -tree.size):
            most = self._width - tree.size if masks else 0
            row = next((row for row, size in enumerate(taken) if size <= most), len(taken))
            taken += [0] * (row == len(taken))
            first, own = taken[row], taken[row] + tree.common
            for number in tree.members:
                self._places[number] = _Place(row, tree.common, first, own, first + tree.size)
                own += len(sequences[number]) - tree.common
            taken[row] += tree.size
        self._taken = taken

    def places(self, number: int) -> Tensor:
        """Return the place of each token of a sequence in [rows * width], int64 [tokens]."""
        row, common, first, own, _ = self._places[number]
        count = len(self._sequences[number]) - common
        return row * self._width + torch.cat((torch.arange(first, first + common), torch.arange(own, own + count)))

    def rows(self, predictors: Tensor, targets: Tensor, device: torch.device | str = "cpu") -> PackedRows:
        """Return the rows, with predictors and targets; see `PackedRows`."""
        count, width = len(self._taken), self._width
        tokens = torch.zeros(count * width, dtype=torch.int64)
        positions = torch.zeros_like(tokens)
        # For each token, the column up to which others see it.
        ends = torch.full_like(tokens, width)
        for number, place in self._places.items():
            where = self.places(number)
            tokens[where] = torch.tensor(self._sequences[number])
            positions[where] = torch.arange(len(where))
            ends[where[: place.common]] = place.end
            ends[where[place.common :]] = place.own + len(where) - place.common
        tokens = tokens.view(count, width).to(device)
        predictors, targets = predictors.to(device), targets.to(device)
        if count == len(self._sequences):
            return PackedRows(tokens, None, None, predictors, targets, self._longest)
        columns = torch.arange(width, device=device)
        seen = (columns <= columns[:, None]) & (columns[:, None] < ends.view(count, 1, width).to(device))
        return PackedRows(
            tokens, positions.view(count, width).to(device), seen[:, None], predictors, targets, self._longest
        )


def _trees(sequences: Sequence[Sequence[int]]) -> list[_Tree]:
    """Return sequences grouped by common prefixes that are worth sharing."""
    trees: list[_Tree] = []
    for number in sorted(range(len(sequences)), key=lambda number: tuple(sequences[number])):
        length = len(sequences[number])
        if trees:
            before = trees[-1]
            common = _common(sequences[before.members[0]], sequences[number], before.common)
            every = before.size + (len(before.members) - 1) * before.common + length
            own = every - (len(before.members) + 1) * common
            if common >= MIN_SHARED and own <= MOST_OTHERS * common and common + own <= WIDEST:
                trees[-1] = _Tree(common, [*before.members, number], common + own)
                continue
        trees.append(_Tree(length, [number], length))
    # A sequence alone shares nothing.
    return [tree if len(tree.members) > 1 else tree._replace(common=0) for tree in trees]


def _common(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """Return the length of the common prefix of two sequences, at most `most`."""
    limit = min(len(one), len(other), most)
    return next((place for place in range(limit) if one[place] != other[place]), limit)
