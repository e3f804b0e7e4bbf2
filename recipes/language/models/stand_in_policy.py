"""The policy of a rehearsal: zero weights with a model's names and shapes, and no computation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from recipes.language.models.packing import PackedRows
from recipes.language.models.policy import AnswerEval, LanguagePolicy
from recipes.training.weight_sources import WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The number of trained scalars.
_WIDTH = 8


class StandInLanguagePolicy(LanguagePolicy):
    """A policy with frozen weights of a model, and a few scalars that are trained."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.requires_grad_(False)
        self.base = nn.Parameter(torch.zeros(_WIDTH))

    @property
    def blocks(self) -> list[nn.Module]:
        """See `AnswerModel`: none, as no layer computes."""
        return []

    def forward(self, rows: PackedRows, temperature: float = 1.0, *, entropy: bool = False) -> AnswerEval:
        logprobs = self.base.float().mean() - torch.ones(len(rows.targets), device=self.base.device)
        return AnswerEval(logprobs, logprobs.detach().neg() if entropy else None)


class Zeros(WeightSource):
    """A source of zero weights."""

    def rows(self, name: str, like: Tensor, start: int, count: int) -> Tensor:
        return torch.zeros((count, *like.shape[1:]) if like.dim() else (), dtype=like.dtype)

    def buffer(self, name: str, like: Tensor) -> Tensor | None:
        return None
