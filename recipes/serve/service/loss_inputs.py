"""The losses of the Tinker SDK that are served: what each reads. `recipes.serve.workers.token_losses` computes them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

LOW: Final = "clip_low_threshold"
HIGH: Final = "clip_high_threshold"


class ServedLoss(NamedTuple):
    """The inputs of a loss.

    Attributes:
        needs: tensors that a datum must have.
        takes: tensors that it may have.
        settings: numbers that the loss takes, with their defaults.
    """

    needs: tuple[str, ...]
    takes: tuple[str, ...] = ()
    settings: Mapping[str, float] = MappingProxyType({})


_POLICY: Final = ("target_tokens", "logprobs", "advantages")
# Bounds of the ratio of probabilities itself.
_CLIPS: Final[Mapping[str, float]] = {LOW: 0.8, HIGH: 1.2}
LOSS_INPUTS: Final[Mapping[str, ServedLoss]] = {
    "cross_entropy": ServedLoss(("target_tokens", "weights")),
    "importance_sampling": ServedLoss(_POLICY),
    "ppo": ServedLoss(_POLICY, (LOW, HIGH), _CLIPS),
    "cispo": ServedLoss(_POLICY, (LOW, HIGH), _CLIPS),
    "dro": ServedLoss(_POLICY, (), {"beta": 0.05}),
    "gspo": ServedLoss(_POLICY, (LOW, HIGH, "sequence_ratio_mask"), _CLIPS),
}
