"""Exchange of batches between actors and the groups that evaluate tokens: critic, reference and teacher.

Each actor distributes its answers over the ranks of the other group, balanced by tokens, and gets a value of each
answer token back. Messages between two workers keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import RolloutBatch, balanced, whole_groups
from recipes.training.typed_tensors import integers, pieces
from rlinf_core import Worker


class EvaluationClient:
    """The actor's side of the exchange.

    Args:
        worker: the actor.
        group_name: the name of the evaluating group.
        size: the number of its workers.
    """

    def __init__(self, worker: Worker, group_name: str, size: int) -> None:
        self._worker = worker
        self._peers = [(group_name, rank) for rank in range(size)]
        self._rows: list[Tensor] = []
        self._lengths = torch.empty(0, dtype=torch.int64)

    def send(self, batch: RolloutBatch) -> None:
        """Distribute complete groups of a batch over the workers."""
        self._rows = [torch.tensor(rows, dtype=torch.int64) for rows in shares(batch, len(self._peers))]
        self._lengths = batch.answer_lengths
        for rows, (group, rank) in zip(self._rows, self._peers, strict=True):
            self._worker.send(batch.select(rows), group, rank)

    def send_tokens(self, values: Tensor) -> None:
        """Send values of the last batch's answer tokens, float [A], distributed like that batch."""
        split = pieces(values, integers(self._lengths))
        for rows, (group, rank) in zip(self._rows, self._peers, strict=True):
            mine = [split[row] for row in integers(rows)]
            self._worker.send(torch.cat(mine) if mine else values[:0], group, rank)

    def recv_tokens(self) -> Tensor:
        """Receive the workers' values of the last batch's answer tokens, float [A]."""
        tokens: list[Tensor] = [torch.empty(0)] * len(self._lengths)
        for rows, (group, rank) in zip(self._rows, self._peers, strict=True):
            values: Tensor = self._worker.recv(group, rank)
            for row, piece in zip(integers(rows), pieces(values, integers(self._lengths[rows])), strict=True):
                tokens[row] = piece
        return torch.cat(tokens) if tokens else torch.empty(0)


class EvaluationServer:
    """An evaluating worker's side of the exchange.

    Args:
        worker: the worker.
        group_name: the name of the actors' group.
        size: the number of actors.
    """

    def __init__(self, worker: Worker, group_name: str, size: int) -> None:
        self._worker = worker
        self._peers = [(group_name, rank) for rank in range(size)]
        self._counts: list[int] = []

    def recv(self) -> RolloutBatch:
        """Return this worker's share of the batches of all actors."""
        batches: list[RolloutBatch] = [self._worker.recv(group, rank) for group, rank in self._peers]
        self._counts = [len(batch.trained) for batch in batches]
        return RolloutBatch.joined(batches)

    def recv_tokens(self) -> Tensor:
        """Receive the actors' values of the last batch's answer tokens, float [A]."""
        return torch.cat([self._worker.recv(group, rank) for group, rank in self._peers])

    def send_tokens(self, values: Tensor) -> None:
        """Send every actor the values of its answer tokens of the last batch, float [A] in total."""
        for piece, (group, rank) in zip(pieces(values, self._counts), self._peers, strict=True):
            self._worker.send(piece.contiguous(), group, rank)


def shares(batch: RolloutBatch, parts: int) -> Sequence[list[int]]:
    """Return the answers for each of several workers: complete groups, with similar token counts."""
    groups, lengths = whole_groups(batch), integers(batch.lengths)
    dealt = balanced([sum(lengths[row] for row in group) for group in groups], parts)
    return [[row for index in part for row in groups[index]] for part in dealt]
