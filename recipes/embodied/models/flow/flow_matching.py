"""Flow matching, and its variant with noise at each step, which provides log-probabilities for reinforcement learning.

A flow carries noise x_0, drawn from a standard normal distribution, to a sample x_1 along x_t = (1 - t) x_0 + t x_1; a
network estimates the velocity v = x_1 - x_0 (Lipman et al., arXiv 2210.02747). Its ordinary differential equation gives
no log-probabilities of samples. A stochastic one with the same marginals at every t does,

    dx = (v + s^2 / 2 * score) dt + s dw,    score = -(x - t v) / (1 - t)

(Song et al., arXiv 2011.13456; for reinforcement learning Flow-GRPO, arXiv 2505.05470): each Euler step draws from a
normal distribution. Here s = noise * sqrt(1 - t), so that s^2 score is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# The velocity at x [n, ...] and at the time t of each sample, [n].
Velocity = Callable[[Tensor, Tensor], Tensor]
_LOG_SQRT_TAU = math.log(2 * math.pi) / 2


class FlowSde:
    """The Euler steps of a stochastic flow, with noise at every step.

    A draw is recorded as [R, n, ...] with the sample last: here R = K + 1, the chain of all steps from the initial
    noise. Log-probabilities are those of S steps, here all K. The initial noise does not depend on the weights, and has
    none.

    Args:
        steps: K, the number of steps from noise to sample.
        noise: the scale of the noise at each step.
    """

    def __init__(self, steps: int, noise: float) -> None:
        self.steps = steps
        self.noise = noise

    @property
    def recorded(self) -> int:
        """R, the length of a record."""
        return self.steps + 1

    @property
    def judged(self) -> int:
        """S, how often the velocity is computed to evaluate a sample."""
        return self.steps

    def draw(self, velocity: Velocity, like: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw samples in the shape of `like`, [n, ...].

        Returns:
            The record, [R, n, ...], and the log-probability of each number of each step, [S, n, ...].
        """
        x = torch.empty_like(like).normal_(generator=generator)
        chain, logprobs = [x], list[Tensor]()
        for index in range(self.steps):
            at = _steps(x, index)
            drawn = torch.empty_like(x).normal_(generator=generator)
            mean, deviation = self._step(x, velocity(x, at / self.steps), at)
            x = mean + deviation * drawn
            chain.append(x)
            logprobs.append(_logprob(drawn, deviation))
        return torch.stack(chain), torch.stack(logprobs)

    def follow(self, velocity: Velocity, start: Tensor) -> Tensor:
        """Return the ends [n, ...] of the flow without noise."""
        x = start
        for index in range(self.steps):
            x = x + velocity(x, _steps(x, index) / self.steps) / self.steps
        return x

    def logprobs(self, velocity: Velocity, record: Tensor) -> Tensor:
        """Return the log-probability of each number of each step of a record, [S, n, ...]."""
        return torch.stack(
            [
                self._judge(velocity, record[index], record[index + 1], _steps(record[0], index))
                for index in range(self.steps)
            ]
        )

    def entropies(self, record: Tensor) -> Tensor:
        """Return the entropies of the distributions of each number, [S, n, ...], which are constants."""
        return torch.stack([self._entropy(record[0], _steps(record[0], index)) for index in range(self.steps)])

    def _judge(self, velocity: Velocity, x: Tensor, after: Tensor, at: Tensor) -> Tensor:
        mean, deviation = self._step(x, velocity(x, at / self.steps), at)
        return _logprob((after - mean) / deviation, deviation)

    def _entropy(self, like: Tensor, at: Tensor) -> Tensor:
        return (0.5 + _LOG_SQRT_TAU + self._deviation(at, like).log()).expand_as(like)

    def _step(self, x: Tensor, velocity: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of x after step number `at`, [n]."""
        time = _beside(at / self.steps, x)
        drift = velocity - self.noise**2 / 2 * (x - time * velocity)
        return x + drift / self.steps, self._deviation(at, x)

    def _deviation(self, at: Tensor, like: Tensor) -> Tensor:
        return _beside(self.noise * ((1 - at / self.steps) / self.steps).sqrt(), like)


class OneStepSde(FlowSde):
    """The steps of a flow with noise at one step, drawn anew for each sample (pi_RL, arXiv 2510.25889).

    One velocity evaluates a sample, whatever K is. The record holds x before that step, x after it, the step's number,
    and the sample: R = 4, S = 1.
    """

    @property
    def recorded(self) -> int:
        return 4

    @property
    def judged(self) -> int:
        return 1

    def draw(self, velocity: Velocity, like: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        x = torch.empty_like(like).normal_(generator=generator)
        drawn = torch.empty_like(x).normal_(generator=generator)
        # The generator may be on another device than integers are drawn on.
        chosen = torch.empty_like(x[:, :1].flatten(1)[:, 0]).uniform_(generator=generator).mul(self.steps).floor()
        chosen = chosen.clamp(max=self.steps - 1)
        before, after, logprobs = x, x, x
        for index in range(self.steps):
            at = _steps(x, index)
            moving = velocity(x, at / self.steps)
            mean, deviation = self._step(x, moving, at)
            noisy = _beside(chosen == index, x)
            following = torch.where(noisy, mean + deviation * drawn, x + moving / self.steps)
            before, after = torch.where(noisy, x, before), torch.where(noisy, following, after)
            logprobs = torch.where(noisy, _logprob(drawn, deviation), logprobs)
            x = following
        return torch.stack((before, after, _beside(chosen, x).expand_as(x), x)), logprobs[None]

    def logprobs(self, velocity: Velocity, record: Tensor) -> Tensor:
        return self._judge(velocity, record[0], record[1], _chosen(record))[None]

    def entropies(self, record: Tensor) -> Tensor:
        return self._entropy(record[0], _chosen(record))[None]


def flow_matching_losses(
    velocity: Velocity, samples: Tensor, generator: torch.Generator | None = None, time: Tensor | None = None
) -> Tensor:
    """Return the squared errors of the velocity toward samples, [n, ...].

    Args:
        velocity: the network that learns.
        samples: the target samples.
        generator: source of randomness; None: torch's own.
        time: the time of each sample, [n]; None: drawn uniformly from 0 to 1.
    """
    noise = torch.empty_like(samples).normal_(generator=generator)
    if time is None:
        time = torch.empty(len(samples), dtype=samples.dtype, device=samples.device).uniform_(generator=generator)
    at = _beside(time, samples)
    return (velocity((1 - at) * noise + at * samples, time) - (samples - noise)).square()


def _steps(like: Tensor, index: int) -> Tensor:
    """Return a step number for each of the samples [n, ...], [n]."""
    # A traced policy takes batches of any size; `len` would fix the example's.
    return like.new_full((like.shape[0],), index)


def _chosen(record: Tensor) -> Tensor:
    """Return the number of the noisy step, [n], in a record of `OneStepSde`."""
    return record[2].flatten(1)[:, 0]


def _beside(numbers: Tensor, like: Tensor) -> Tensor:
    """Reshape numbers [n] to broadcast over samples [n, ...]."""
    return numbers.view(-1, *[1] * (like.dim() - 1))


def _logprob(standard: Tensor, deviation: Tensor) -> Tensor:
    """Return the log-probability of a value that is `standard` standard deviations from the mean."""
    return -standard.square() / 2 - _LOG_SQRT_TAU - deviation.log()
