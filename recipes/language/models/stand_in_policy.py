"""The policy of a rehearsal: weights of a model's names and shapes, which are zeros, and nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from recipes.language.models.packing import PackedRows
from recipes.language.models.policy import AnswerEval, LanguagePolicy
from recipes.training.initial.weight_sources import WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Numbers that are trained.
_WIDTH = 8


class StandInLanguagePolicy(LanguagePolicy):
    """A policy with the weights of a model, which are zeros and not trained, and a few numbers that are."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.requires_grad_(False)
        self.base = nn.Parameter(torch.zeros(_WIDTH))

    @property
    def blocks(self) -> list[nn.Module]:
        """See `AnswerModel`: no layer computes, so that none is gathered alone."""
        return []

    def forward(self, rows: PackedRows, temperature: float = 1.0, *, entropy: bool = False) -> AnswerEval:
        logprobs = self.base.float().mean() - torch.ones(len(rows.targets), device=self.base.device)
        return AnswerEval(logprobs, logprobs.detach().neg() if entropy else None)


class Zeros(WeightSource):
    """Weights that are zeros."""

    def rows(self, name: str, like: Tensor, start: int, count: int) -> Tensor:
        return torch.zeros((count, *like.shape[1:]) if like.dim() else (), dtype=like.dtype)

    def buffer(self, name: str, like: Tensor) -> Tensor | None:
        return None
