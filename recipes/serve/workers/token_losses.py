"""Losses of the Tinker SDK: sums over tokens; thresholds bound the ratio itself, as 0.8 and 1.2 do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import torch
from torch import Tensor

from recipes.serve.values import HIGH, LOW

Inputs: TypeAlias = Mapping[str, Tensor]
Settings: TypeAlias = Mapping[str, float]
TokenLoss: TypeAlias = Callable[[Tensor, Inputs, Settings], Tensor]
"""Returns the sum over the tokens of one sequence, a scalar.

It takes log-probabilities of the targets, float [N] or [N, K], inputs of that shape, and the settings of the loss.
"""


def _cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -(logprobs * inputs["weights"]).sum()


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


def _clipped(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return ratios within the thresholds, which are those of the tokens where these are given."""
    low = inputs[LOW] if LOW in inputs else torch.as_tensor(settings[LOW])
    high = inputs[HIGH] if HIGH in inputs else torch.as_tensor(settings[HIGH])
    return torch.maximum(torch.minimum(ratio, high.to(ratio)), low.to(ratio))


def _importance_sampling(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -(_ratio(logprobs, inputs) * inputs["advantages"]).sum()


def _ppo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """PPO's clipped objective (Schulman et al., arXiv 1707.06347, eq. 7)."""
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, settings) * advantages).sum()


def _cispo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): the clipped ratio is a weight, and has no gradient."""
    weight = _clipped(_ratio(logprobs, inputs), inputs, settings).detach()
    return -(weight * logprobs * inputs["advantages"]).sum()


def _dro(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Direct reward optimisation (Richemond et al., arXiv 2405.19107), by tokens, with advantages for its rewards."""
    distance = (logprobs - inputs["logprobs"]).square()
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * distance).sum()


def _gspo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """GSPO's token form (Zheng et al., arXiv 2507.18071, eq. 14): the sequence's ratio clips, tokens have gradients.

    The ratio is the geometric mean over the tokens of `sequence_ratio_mask`, by default those with an advantage.
    """
    advantages = inputs["advantages"]
    mask = inputs.get("sequence_ratio_mask")
    mask = (advantages != 0).to(logprobs) if mask is None else mask
    mean = ((logprobs - inputs["logprobs"]) * mask).sum() / mask.sum().clamp(min=1)
    ratio = mean.detach().exp() * (logprobs - logprobs.detach()).exp()
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, settings) * advantages).sum()


LOSSES: Final[Mapping[str, TokenLoss]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}
