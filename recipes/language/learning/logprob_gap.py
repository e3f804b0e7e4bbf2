"""The difference of log-probabilities between the engine that drew tokens and the trainer that learns from them.

Both hold the same weights, so rounding explains only small differences. Larger ones mean different models: another
precision or chat template, a temperature that one of them ignores, or weights that did not arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from recipes.training.sharding import ParallelStrategy
from recipes.training.typed_tensors import floats
from rlinf_core import RLinfError
from rlinf_core.algorithms.loss_inputs import kl_estimate

# The largest difference of one token that rounding explains, in nats, by the precision of the weights.
GAP_LIMITS: Final[Mapping[str, float]] = {"fp32": 1e-2, "bf16": 1.0, "fp16": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGap:
    """Statistics of the difference, over all ranks.

    Attributes:
        mean: the mean absolute difference.
        largest: the largest absolute difference.
        k3: the k3 estimate of the KL divergence of the engine's policy from the trainer's.
        tokens: the number of tokens compared.
    """

    mean: float
    largest: float
    k3: float
    tokens: int

    def metrics(self) -> dict[str, float]:
        """Return the metrics by their full names."""
        return {
            "train/logprob_gap/mean": self.mean,
            "train/logprob_gap/max": self.largest,
            "train/logprob_gap/k3": self.k3,
        }

    def error(self, limit: float, step: int) -> RLinfError:
        """Return the error for a difference beyond `limit`."""
        return RLinfError(
            f"log-probabilities of engine and trainer differ by up to {self.largest:.3g}, more than {limit:g}",
            where=f"step {step}, {self.tokens} tokens, {self.mean:.3g} on average",
            why="they have equal weights, so their models must differ",
            help="actor and rollout must have the same model, precision, chat template and sampling parameters;"
            " `rollout.check_logprobs: off` trains anyway",
        )


def logprob_gap(differences: Tensor, strategy: ParallelStrategy) -> LogprobGap | None:
    """Return the difference between trainer and engine, over all ranks; None if there is no token to compare.

    Collective: all ranks call it together, and get the same result.

    Args:
        differences: float [m], log-probabilities of the trainer minus those of the engine, for this rank's tokens.
        strategy: the ranks.
    """
    differences = differences.double().cpu()
    size, nothing = differences.abs(), torch.zeros(len(differences)).double()
    sums = torch.stack((nothing.new_tensor(len(size)), size.sum(), kl_estimate(nothing, differences, "k3").sum()))
    # The maximum of each rank, in its own slot.
    largest = torch.zeros(strategy.world_size, dtype=torch.float64)
    largest[strategy.rank] = size.max() if len(size) else 0.0
    count, total, k3, *maxima = floats(strategy.reduce_sum(torch.cat((sums, largest))))
    if not count:
        return None
    return LogprobGap(mean=total / count, largest=max(maxima), k3=k3 / count, tokens=int(count))
