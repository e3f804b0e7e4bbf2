"""Micro-batches of answers by tokens, the same number on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import RolloutBatch, token_budget_parts, whole_groups
from recipes.language.answers.sequences import undrawn
from recipes.language.models.packing import MOST_OTHERS, WIDEST, PackedRows, pack
from recipes.training.sharding import ParallelStrategy
from recipes.training.typed_tensors import integers, pieces


class MicroBatches:
    """Divides a rank's answers into micro-batches, and packs them.

    Args:
        strategy: the ranks, which all have as many micro-batches.
        device: where packed rows are to be.
        max_tokens: packed tokens of a micro-batch; an answer with its prompt above it is one by itself.
        masks: whether the model takes rows with a mask, see `RowLayout`.
        max_answers: answers of a micro-batch at most; None: any number.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        device: torch.device,
        *,
        max_tokens: int,
        masks: bool,
        max_answers: int | None = None,
    ) -> None:
        self._strategy = strategy
        self._device = device
        self._max_tokens = max_tokens
        self._masks = masks
        self._max_answers = max_answers

    def divide(self, batch: RolloutBatch, rows: list[int]) -> list[list[int]]:
        """Return answers in micro-batches of similar length; as many on every rank, at least one, some of them empty.

        Collective: all ranks call it together.
        """
        limit, most = self._max_tokens, self._max_answers or max(1, len(rows))
        chosen = set(rows)
        units: list[list[int]] = []
        for group in whole_groups(batch):
            mine = [row for row in group if row in chosen]
            for start in range(0, len(mine), most):
                candidates = mine[start : start + most]
                fits = self._masks and _packed_tokens(batch, candidates) <= limit
                units += [candidates] if fits else [[row] for row in candidates]
        costs = [_packed_tokens(batch, unit) for unit in units]
        counts, shares_row = [len(unit) for unit in units], WIDEST if self._masks else 0
        budgets = token_budget_parts(costs, limit, counts, most, shares_row=shares_row)
        parts = [[row for index in part for row in units[index]] for part in budgets]
        wanted = self._strategy.reduce_max(max(1, len(parts)))
        return parts + [[] for _ in range(wanted - len(parts))]

    def pack(self, batch: RolloutBatch, rows: list[int]) -> PackedRows:
        """Return answers in packed rows; without answers, a dummy token that keeps ranks in step."""
        chosen = batch.select(torch.tensor(rows)) if rows else STAND_IN
        return pack(chosen, masks=self._masks, device=self._device)

    @torch.no_grad()
    def evaluate(self, batch: RolloutBatch, compute: Callable[[PackedRows], Tensor]) -> Tensor:
        """Return a value of each answer token, float32 [A], on the CPU. Collective: all ranks call it together.

        Args:
            batch: this rank's answers.
            compute: returns the values of packed answer tokens, float [A'].
        """
        parts = self.divide(batch, list(range(len(batch))))
        logprobs = [compute(self.pack(batch, rows)).float().cpu()[: None if rows else 0] for rows in parts]
        order = torch.tensor([row for rows in parts for row in rows], dtype=torch.int64)
        if not len(order):
            return torch.empty(0)
        split = pieces(torch.cat(logprobs), integers(batch.answer_lengths[order]))
        return torch.cat([split[index] for index in integers(order.argsort())])


def _packed_tokens(batch: RolloutBatch, rows: list[int]) -> int:
    """Return about how many tokens some answers of one group take in rows: their prompt stands before each few.

    Segments of a trajectory begin with prompts of different lengths; those that are as long are taken for equal.
    """
    chosen = torch.tensor(rows)
    lengths, prompts = integers(batch.lengths[chosen]), integers(batch.prompt_lengths[chosen])
    own: Counter[int] = Counter()
    for length, prompt in zip(lengths, prompts, strict=True):
        own[prompt] += length - prompt
    packed = sum(prompt * -(-drawn // (MOST_OTHERS * prompt)) + drawn for prompt, drawn in own.items())
    return min(packed, sum(lengths))


# An answer of one token that is not trained on.
STAND_IN = RolloutBatch.of([undrawn((0,), (0,), (False,), finish_reason="length")], 1, [0.0])
