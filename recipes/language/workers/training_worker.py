"""The base of workers that train, and their exchange of batches with workers that evaluate tokens.

Each actor distributes its answers over the ranks of the critic, reference or teacher, balanced by tokens, and gets a
value of each answer token back. Messages between two workers keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import RolloutBatch, balanced, whole_groups
from recipes.language.learning.warm_start import begin_training
from recipes.language.models.policy import LanguagePolicy
from recipes.training.comparing_worker import ComparingWorker
from recipes.training.typed_tensors import integers, pieces
from recipes.training.updater import SKIPPED, Figures
from recipes.training.weights.training_state import TrainingState
from rlinf_core import Worker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainingWorker(ComparingWorker):
    """A worker that trains a model, shared by the ranks of its group as `actor.fsdp_config` says."""

    _state: TrainingState

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._config = config

    def _begin_training(
        self, tokenizer: PreTrainedTokenizerBase, is_sent: Callable[[str], bool] = lambda _: False
    ) -> LanguagePolicy:
        """Load or build the model of `actor`; see `begin_training`."""
        policy, self._state = begin_training(
            self._config,
            tokenizer,
            self._contact,
            device=self.torch_device,
            rank=self._rank,
            world_size=self._world_size,
            is_sent=is_sent,
        )
        return policy

    def _offload(self) -> None:
        """Free the accelerator for other components, if `actor.enable_offload` is set."""
        if self._config.actor.enable_offload:
            self._state.offload()

    def _begin_step(self, step: int, last_step: int | None) -> float:
        """Move the training state onto the accelerator, and return the learning rate of a step."""
        self._state.onload()
        return self._state.apply_settings(step, last_step)

    def _end_step(self, step: int, figures: Figures) -> dict[str, float]:
        """Count the step, and return metrics of its updates."""
        self._state.version += 1
        self._offload()
        if figures.skipped:
            self.log_warning(SKIPPED, step, figures.skipped)
        return figures.metrics(counts_skipped=self._config.runner.on_nonfinite == "skip")

    def save_checkpoint(self, folder: str) -> None:
        """Write weights and optimizer into a folder that every rank sees. Collective: all ranks call it."""
        self._state.save(folder)

    def load_checkpoint(self, folder: str) -> int:
        """Load a checkpoint of `save_checkpoint`, and return the version of the weights."""
        self._state.load(folder)
        return self._state.version


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
