"""Advantages of answer tokens, computed by the function that `algorithm.adv_type` names."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.sequences import undrawn
from recipes.training.typed_tensors import integers
from rlinf_core import AdvantageSettings, Trajectories
from rlinf_core.algorithms.advantages import AdvantageFunction, estimate


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
