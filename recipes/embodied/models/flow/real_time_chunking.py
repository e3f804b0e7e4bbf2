"""Real-time chunking: a flow continues the chunk that is being carried out while it computes the next one.

Black, Galliker and Levine, "Real-time execution of action chunking flow policies" (arXiv 2506.07339). Actions that will
have been carried out by then are frozen, and the rest of the old chunk draws the new one toward it, less the later it
is: inpainting by guidance with a soft mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recipes.embodied.models.flow.flow_matching import Velocity


def overlap_weights(horizon: int, executed: int, delay: int) -> Tensor:
    """Return how strongly each action of a new chunk is drawn to the old one, float32 [H] (equation 5 of the paper).

    Args:
        horizon: H, actions of a chunk.
        executed: actions between the beginnings of the two chunks.
        delay: first actions of the new chunk, during which it is computed: they weigh 1.
    """
    overlap = horizon - executed
    index = torch.arange(horizon)
    share = ((overlap - index) / (overlap - delay + 1)).clamp(0, 1)
    falling = share * torch.expm1(share) / (math.e - 1)
    return torch.where(index < delay, 1.0, falling)


def guided(velocity: Velocity, target: Tensor, weights: Tensor, most: float) -> Velocity:
    """Return a velocity that leads toward a target, too (equations 2 to 4 of the paper).

    Args:
        velocity: the velocity of the flow.
        target: the old chunk from its first action that is not carried out yet, [n, H, M]; anything where weights are
            0.
        weights: weights of its actions, [n, H].
        most: the largest strength of the guidance, beta.
    """

    def toward(x: Tensor, time: Tensor) -> Tensor:
        at = time.view(-1, 1, 1)
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            moving = velocity(start, time)
            end = start + (1 - at) * moving
            error = ((target - end) * weights[..., None]).detach()
            (pull,) = torch.autograd.grad(end, start, error)
        # (1 - t) / (t r^2) with r^2 = (1 - t)^2 / (t^2 + (1 - t)^2); it is infinite at both ends.
        strength = ((at.square() + (1 - at).square()) / (at * (1 - at))).clamp(max=most)
        return moving.detach() + strength * pull

    return toward
