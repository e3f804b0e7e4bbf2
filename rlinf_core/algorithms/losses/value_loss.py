"""The loss of a value function."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_core.algorithms.aggregation import aggregate
from rlinf_core.algorithms.losses.inputs import Loss, LossSettings


def huber(errors: Tensor, delta: float | None) -> Tensor:
    """e^2 / 2 up to |e| = delta, delta (|e| - delta / 2) beyond; None: e^2 / 2 always. The shape of `errors`."""
    if delta is None:
        return errors.square() / 2
    size = errors.abs()
    return torch.where(size <= delta, errors.square() / 2, delta * (size - delta / 2))


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None, huber_delta: float | None
) -> tuple[Tensor, Tensor]:
    """Return the larger of the loss of the value, and of the value moved at most `value_clip` from where it was.

    As in the implementation that came with the PPO paper (OpenAI baselines, `ppo2`), with the Huber loss in the place
    of the square.

    Args:
        values: float [...], with gradients.
        old_values: float [...], when the samples were made.
        returns: float [...], what values learn.
        value_clip: largest change of a value; None: any.
        huber_delta: error from which the loss grows linearly; None: it never does.

    Returns:
        The losses, and whether the clipped one was the larger; each [...].
    """
    plain = huber(returns - values, huber_delta)
    if value_clip is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    clipped = huber(returns - near, huber_delta)
    return torch.maximum(plain, clipped), clipped > plain


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    settings: LossSettings,
    mask: Tensor | None = None,
    total: Tensor | float | None = None,
) -> Loss:
    """Return the mean of `clipped_value_loss` over the values that count.

    Args:
        values, old_values, returns: see `clipped_value_loss`.
        settings: `value_clip` and `huber_delta` count.
        mask: bool, the shape of `values` or its leading dimensions; None: everything counts.
        total: the number of values that count in the whole batch if this is part of one, see `LossInputs.value_total`.
    """
    losses, clipped = clipped_value_loss(values, old_values, returns, settings.value_clip, settings.huber_delta)
    loss = aggregate(losses, mask, "token-mean", total)
    fraction = aggregate(clipped.float(), mask, "token-mean", total)
    return Loss(loss, {"critic/value_loss": loss.detach(), "critic/value_clip_fraction": fraction})
