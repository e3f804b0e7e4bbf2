"""Advantages of answer tokens, by the functions that `algorithm.adv_type` names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recipes.language.batch import RolloutBatch
from rlinf_core import Advantages, AdvantageSettings, Trajectories

AdvantageFunction = Callable[[Trajectories, AdvantageSettings], Advantages]


def token_advantages(
    batch: RolloutBatch,
    function: AdvantageFunction,
    settings: AdvantageSettings,
    *,
    values: Tensor | None = None,
    kl: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the advantage of each answer token, and what values learn.

    An answer is a trajectory whose steps are its tokens; its reward comes with the last one that is learned from, and
    those that are not, which the policy did not draw, do not count.

    Args:
        batch: whole groups, their members next to each other.
        function: of the registry of advantages.
        settings: of the function.
        values: float [A], of the state before each token; None without a critic.
        kl: float [A], divergence from the reference, to be taken off the rewards; None: none.

    Returns:
        float32 [A], and the same or None.
    """
    lengths = batch.answer_lengths
    if not len(batch):
        return torch.empty(0), None
    steps = torch.arange(int(lengths.max()))[:, None]
    inside = steps < lengths[None]

    def by_time(tokens: Tensor) -> Tensor:
        """Lay values of tokens, [A], as [T, n]."""
        laid = torch.zeros(inside.T.shape, dtype=tokens.dtype).masked_scatter(inside.T, tokens)
        return laid.T.contiguous()

    counts = by_time(batch.trained)
    last = steps == torch.where(counts, steps, -1).amax(dim=0)
    rewards = torch.where(last, batch.rewards[None], 0.0)
    laid_values = None
    if values is not None:
        laid_values = torch.cat((by_time(values), torch.zeros(1, len(batch))))
    found = function(
        Trajectories(
            rewards=rewards,
            dones=last | ~inside,
            values=laid_values,
            mask=counts,
            kl=None if kl is None else by_time(kl),
        ),
        settings,
    )
    returns = None if found.returns is None else found.returns.T[inside.T]
    return found.advantages.T[inside.T], returns
