"""Micro-batches of answers by tokens, the same number on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import RolloutBatch, token_budget_parts, whole_groups
from recipes.language.models.packing import PackedRow, pack, packed_tokens
from recipes.training.sharding import ParallelStrategy
from recipes.training.typed_tensors import integers, pieces


class MicroBatches:
    """Divides a rank's answers into micro-batches, and packs them.

    Args:
        strategy: the ranks, which all have as many micro-batches.
        device: where packed rows are to be.
        max_tokens: packed tokens of a micro-batch; an answer with its prompt above it is one by itself.
        share_prompts: whether the prompt of a group stands once in a packed row.
        max_answers: answers of a micro-batch at most; None: any number.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        device: torch.device,
        *,
        max_tokens: int,
        share_prompts: bool,
        max_answers: int | None = None,
    ) -> None:
        self._strategy = strategy
        self._device = device
        self._max_tokens = max_tokens
        self._share = share_prompts
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
                fits = self._share and packed_tokens(batch, candidates, share_prompts=True) <= limit
                units += [candidates] if fits else [[row] for row in candidates]
        costs = [packed_tokens(batch, unit, share_prompts=self._share) for unit in units]
        budgets = token_budget_parts(costs, limit, [len(unit) for unit in units], most)
        parts = [[row for index in part for row in units[index]] for part in budgets]
        wanted = self._strategy.reduce_max(max(1, len(parts)))
        return parts + [[] for _ in range(wanted - len(parts))]

    def pack(self, batch: RolloutBatch, rows: list[int]) -> PackedRow:
        """Return answers in a packed row; without answers, a dummy token that keeps ranks in step."""
        if not rows:
            return pack(STAND_IN, share_prompts=False, device=self._device)
        return pack(batch.select(torch.tensor(rows)), share_prompts=self._share, device=self._device)

    @torch.no_grad()
    def evaluate(self, batch: RolloutBatch, compute: Callable[[PackedRow], Tensor]) -> Tensor:
        """Return a value of each answer token, float32 [A], on the CPU. Collective: all ranks call it together.

        Args:
            batch: this rank's answers.
            compute: returns the values of a packed row's answer tokens, float [A'].
        """
        parts = self.divide(batch, list(range(len(batch))))
        logprobs = [compute(self.pack(batch, rows)).float().cpu()[: None if rows else 0] for rows in parts]
        order = torch.tensor([row for rows in parts for row in rows], dtype=torch.int64)
        if not len(order):
            return torch.empty(0)
        split = pieces(torch.cat(logprobs), integers(batch.answer_lengths[order]))
        return torch.cat([split[index] for index in integers(order.argsort())])


def _stand_in() -> RolloutBatch:
    one = torch.ones(1, dtype=torch.int64)
    return RolloutBatch(
        tokens=torch.zeros(2, dtype=torch.int64),
        lengths=2 * one,
        prompt_lengths=one,
        trained=torch.zeros(1, dtype=torch.bool),
        logprobs=torch.zeros(1),
        versions=one,
        groups=one,
        samples=one,
        rewards=torch.zeros(1),
        step_rewards=torch.zeros(1),
        finished=torch.zeros(1, dtype=torch.bool),
        minibatches=torch.zeros(1, dtype=torch.int64),
    )


# An answer of one token that is not trained on.
STAND_IN = _stand_in()
