"""Micro-batches of answers by tokens, equally many on every rank."""

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
    """A divider of a rank's answers into packed micro-batches.

    Args:
        strategy: the ranks, which get equally many micro-batches.
        device: the device of packed rows.
        max_tokens: the maximum packed tokens of a micro-batch; a longer answer is a micro-batch by itself.
        masks: whether the model accepts rows with a mask, see `RowLayout`.
        max_answers: the maximum answers of a micro-batch; None: no limit.
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
        """Return answers in micro-batches of similar length, equally many on every rank, at least one; some may be
        empty.

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
    """Return the approximate tokens of packed answers of one group, where several answers share a copy of the prompt.

    Segments of a trajectory have different prompts; prompts of equal length are taken for equal.
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
