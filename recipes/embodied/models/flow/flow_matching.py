"""Flow matching, and its form with noise at each step, by which reinforcement learning gets log-probabilities.

A flow carries noise x_0, drawn from a standard normal distribution, to a sample x_1 along x_t = (1 - t) x_0 + t x_1; a
network estimates the velocity v = x_1 - x_0 (Lipman et al., arXiv 2210.02747). Its ordinary differential equation has
no log-probabilities of samples. A stochastic one with the same distributions at every t has,

    dx = (v + s^2 / 2 * score) dt + s dw,    score = -(x - t v) / (1 - t)

(Song et al., arXiv 2011.13456; for reinforcement learning Flow-GRPO, arXiv 2505.05470): each Euler step draws from a
normal distribution, and a sample is the chain of all steps. Here s = noise * sqrt(1 - t), so that s^2 score is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# The velocity at x [n, ...] and at the time t of each sample, [n].
Velocity = Callable[[Tensor, Tensor], Tensor]
_LOG_SQRT_TAU = math.log(2 * math.pi) / 2


class FlowSde:
    """The Euler steps of a stochastic flow.

    Args:
        steps: K, from noise to sample.
        noise: scale of what is drawn at each step.
    """

    def __init__(self, steps: int, noise: float) -> None:
        self.steps = steps
        self.noise = noise

    def draw(self, velocity: Velocity, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return chains [K + 1, n, ...] from noise to samples, in the shape of `like`."""
        x = torch.empty_like(like).normal_(generator=generator)
        chain = [x]
        for index, time in self._times(x):
            mean, deviation = self._step(x, velocity(x, time), index)
            x = mean + deviation * torch.empty_like(x).normal_(generator=generator)
            chain.append(x)
        return torch.stack(chain)

    def follow(self, velocity: Velocity, start: Tensor) -> Tensor:
        """Return chains [K + 1, n, ...] of the flow without noise."""
        x = start
        chain = [x]
        for _, time in self._times(x):
            x = x + velocity(x, time) / self.steps
            chain.append(x)
        return torch.stack(chain)

    def logprobs(self, velocity: Velocity, chain: Tensor) -> Tensor:
        """Return the log-probability of each number of each step, [K + 1, n, ...]: those of the first noise, too."""
        logprobs = [_logprob(chain[0])]
        for index, time in self._times(chain[0]):
            x = chain[index]
            mean, deviation = self._step(x, velocity(x, time), index)
            logprobs.append(_logprob((chain[index + 1] - mean) / deviation) - math.log(deviation))
        return torch.stack(logprobs)

    def entropies(self, like: Tensor) -> Tensor:
        """Return the entropies of the distributions of each number, [K + 1, n, ...]; they are constants."""
        deviations = [1.0, *(self._deviation(index) for index in range(self.steps))]
        values = like.new_tensor([0.5 + _LOG_SQRT_TAU + math.log(deviation) for deviation in deviations])
        return values.view(-1, *[1] * like.dim()).expand(-1, *like.shape)

    def _times(self, like: Tensor) -> Iterator[tuple[int, Tensor]]:
        for index in range(self.steps):
            # A traced policy takes batches of any size: `len` would be that of the example.
            yield index, like.new_full((like.shape[0],), index / self.steps)

    def _step(self, x: Tensor, velocity: Tensor, index: int) -> tuple[Tensor, float]:
        """Return mean and deviation of the next x."""
        drift = velocity - self.noise**2 / 2 * (x - index / self.steps * velocity)
        return x + drift / self.steps, self._deviation(index)

    def _deviation(self, index: int) -> float:
        return self.noise * math.sqrt((1 - index / self.steps) / self.steps)


def flow_matching_losses(
    velocity: Velocity, samples: Tensor, generator: torch.Generator | None = None, time: Tensor | None = None
) -> Tensor:
    """Return the squared errors of the velocity toward samples [n, ...], in their shape.

    Args:
        velocity: what learns.
        samples: as they are wanted.
        generator: source of randomness; None: torch's own.
        time: of each sample, [n]; None: drawn evenly from 0 to 1.
    """
    noise = torch.empty_like(samples).normal_(generator=generator)
    if time is None:
        time = torch.empty(len(samples), dtype=samples.dtype, device=samples.device).uniform_(generator=generator)
    at = time.view(-1, *[1] * (samples.dim() - 1))
    return (velocity((1 - at) * noise + at * samples, time) - (samples - noise)).square()


def _logprob(standard: Tensor) -> Tensor:
    return -standard.square() / 2 - _LOG_SQRT_TAU
