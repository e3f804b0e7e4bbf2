"""The targets of answer tokens: advantages, and the comparison of the engine's log-probabilities with the trainer's.

Engine and trainer hold the same weights, so rounding explains only small differences. Larger ones mean different
models: another precision or chat template, a temperature that one of them ignores, or weights that did not arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.sequences import undrawn
from recipes.training.sharding import ParallelStrategy
from recipes.training.typed_tensors import floats, integers
from rlinf_core import AdvantageSettings, RLinfError, Trajectories
from rlinf_core.algorithms.advantages import AdvantageFunction, estimate
from rlinf_core.algorithms.loss_inputs import kl_estimate


def token_advantages(
    batch: RolloutBatch,
    function: AdvantageFunction,
    settings: AdvantageSettings,
    *,
    values: Tensor | None = None,
    kl: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the advantage of each answer token, and the value targets.

    An answer is a trajectory whose steps are its tokens; the segments of a branched trajectory are concatenated. The
    reward, less the step rewards, comes with the last trained token. Untrained tokens, which the policy did not draw,
    do not count.

    Args:
        batch: complete groups with adjacent members; none on a rank without answers.
        function: the registered advantage function.
        settings: the settings of the function.
        values: float [A], value of the state before each token; None without a critic.
        kl: float [A], KL divergence from the reference, to subtract from the rewards; None: none.

    Returns:
        advantages, float32 [A], and value targets, float32 [A] or None.
    """
    if not len(batch):
        # The function may sum over ranks, so each rank calls it: here for a group of untrained tokens.
        size = settings.group_size
        nothing = RolloutBatch.of([undrawn((0,), (0,), (False,), sample=n) for n in range(size)], 0, [0.0] * size)
        zeros = torch.zeros(size)
        advantages, returns = token_advantages(
            nothing,
            function,
            settings,
            values=None if values is None else zeros,
            kl=None if kl is None else zeros,
        )
        return advantages[:0], None if returns is None else returns[:0]
    first, segments = batch.trajectories
    of_segment = torch.arange(len(first)).repeat_interleave(segments)
    lengths = torch.zeros_like(first).index_add(0, of_segment, batch.answer_lengths)
    steps = torch.arange(int(lengths.max()))[:, None]
    inside = steps < lengths[None]

    def by_time(tokens: Tensor) -> Tensor:
        """Return values of tokens, [A], as [T, n], padded with zeros."""
        laid = torch.zeros(inside.T.shape, dtype=tokens.dtype).masked_scatter(inside.T, tokens)
        return laid.T.contiguous()

    counts = by_time(batch.trained)
    last = steps == torch.where(counts, steps, -1).amax(dim=0)
    steps_rewards = by_time(batch.step_rewards)
    rewards = steps_rewards + torch.where(last, batch.rewards[first] - steps_rewards.sum(dim=0), 0.0)
    laid_values = None
    if values is not None:
        laid_values = torch.cat((by_time(values), torch.zeros(1, len(first))))
    estimates = estimate(
        function,
        Trajectories(
            rewards=rewards,
            dones=last | ~inside,
            values=laid_values,
            mask=counts,
            kl=None if kl is None else by_time(kl),
            group_sizes=_group_sizes(batch, settings.group_size),
        ),
        settings,
    )
    returns = None if estimates.returns is None else estimates.returns.T[inside.T]
    return estimates.advantages.T[inside.T], returns


def _group_sizes(batch: RolloutBatch, whole: int) -> list[int] | None:
    """Return the number of trajectories of each group, if some groups lost members; None if all are complete."""
    first, _ = batch.trajectories
    sizes = [len(list(members)) for _, members in groupby(integers(batch.groups[first]))]
    return None if all(size == whole for size in sizes) else sizes


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTargets:
    """The targets of the answer tokens of a batch; all float32 [A].

    Attributes:
        advantages: the advantage of each token.
        old_logprobs: the log-probabilities in the denominator of ratios.
        ref_logprobs: the log-probabilities of the reference model; None: no KL divergence in the loss.
        behaviour_logprobs: the log-probabilities of the policy that drew the tokens, if it is not that of
            `old_logprobs`.
        comparable: bool [A], whether the weights before the update drew the token, for `LanguageLearner.differences`;
            None: no comparison.
    """

    advantages: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    behaviour_logprobs: Tensor | None = None
    comparable: Tensor | None = None

    def as_dict(self) -> dict[str, Tensor]:
        """Return the targets that are not None, by name."""
        names = ("advantages", "old_logprobs", "ref_logprobs", "behaviour_logprobs", "comparable")
        return {name: value for name in names if (value := getattr(self, name)) is not None}
