"""Data of the Tinker SDK: packing into rows, division over ranks, and losses.

Losses are sums over tokens; thresholds bound the ratio, such as 0.8 and 1.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recipes.language.models.packing import MIN_SHARED, WIDEST, RowLayout
from recipes.language.models.policy import LanguagePolicy
from recipes.serve.values import HIGH, LOW, Datum

IntArray: TypeAlias = npt.NDArray[np.int64]


def data_logprobs(policy: LanguagePolicy, data: Sequence[Datum], device: torch.device | str = "cpu") -> Tensor:
    """Return the log-probabilities of the targets of data, in the order of data, positions and K; float32 [A].

    Common prefixes of data are computed once if worth it, and so are equal targets at a position.
    """
    longest = max(len(datum.tokens) for datum in data)
    layout = RowLayout([datum.tokens.tolist() for datum in data], masks=policy.takes_masks(longest))
    positions: list[IntArray] = []
    targets: list[IntArray] = []
    for number, datum in enumerate(data):
        asked = datum.values["target_tokens"].astype(np.int64)
        positions.append(layout.places(number).numpy().repeat(asked.shape[1] if asked.ndim == 2 else 1))
        targets.append(asked.reshape(-1))
    pairs = np.stack([np.concatenate(positions), np.concatenate(targets)])
    once, again = np.unique(pairs, axis=1, return_inverse=True)
    predictors, wanted = (torch.from_numpy(part) for part in once)
    rows = layout.rows(predictors, wanted, device)
    return policy(rows).logprobs.index_select(0, torch.from_numpy(again.reshape(-1)).to(device))


def shares(
    data: Sequence[Datum], world_size: int, rank: int, max_tokens: int, *, masks: bool = True
) -> list[list[int]]:
    """Return the micro-batches of a rank's share of a batch, as numbers of data; there may be none.

    Data with a common prefix are adjacent, so that few micro-batches compute it.

    Args:
        data: the batch of all ranks together.
        world_size, rank: the number of ranks, and the rank of this process.
        max_tokens: the approximate maximum tokens of a micro-batch, with common prefixes counted once; a longer datum
            is a micro-batch by itself.
        masks: whether the model accepts rows with a mask; if not, each datum costs as much as the longest.
    """
    # Big-endian bytes sort like the numbers.
    order = sorted(range(len(data)), key=lambda number: (data[number].tokens.astype(">u4").tobytes(), number))
    lengths = [len(data[number].tokens) for number in order]
    shared = [0, *(_beginning(data[one], data[other]) for one, other in pairwise(order))]
    ends = np.cumsum(np.subtract(lengths, shared))
    parts: list[list[int]] = []
    room, longest = -1, 0
    shares_row = WIDEST if masks else 0
    for place, number in enumerate(order):
        # The datum belongs to the rank whose share of all tokens contains the middle of the datum's tokens.
        middle = ends[place] - (lengths[place] - shared[place]) / 2
        # Clamp to the last rank: equal data add no tokens, so the last ones may lie at the very end.
        if min(world_size - 1, int(middle * world_size / ends[-1])) != rank:
            continue
        cost = lengths[place] - (shared[place] if parts else 0)
        longest = max(longest, lengths[place])
        is_wide = longest > shares_row and (len(parts[-1]) + 1 if parts else 1) * longest > max_tokens
        if cost > room or is_wide:
            parts.append([])
            room, cost, longest = max_tokens, lengths[place], lengths[place]
        parts[-1].append(number)
        room -= cost
    return parts


def _beginning(one: Datum, other: Datum) -> int:
    """Return the length of the common prefix of two data; 0 if not worth sharing."""
    shortest = min(len(one.tokens), len(other.tokens))
    common = int((one.tokens[:shortest] == other.tokens[:shortest]).cumprod().sum())
    return common if common >= MIN_SHARED else 0


Inputs: TypeAlias = Mapping[str, Tensor]
Settings: TypeAlias = Mapping[str, float]
TokenLoss: TypeAlias = Callable[[Tensor, Inputs, Settings], Tensor]
"""A function that returns the summed loss over the tokens of one sequence, a scalar.

Its arguments are log-probabilities of the targets, float [N] or [N, K], inputs of that shape, and settings.
"""


def _cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -(logprobs * inputs["weights"]).sum()


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


def _clipped(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return ratios clipped to the thresholds, which inputs may give per token."""
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
    """Direct reward optimization (Richemond et al., arXiv 2405.19107), per token, with advantages as rewards."""
    distance = (logprobs - inputs["logprobs"]).square()
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * distance).sum()


def _gspo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """GSPO's token form (Zheng et al., arXiv 2507.18071, eq. 14): the sequence's ratio is clipped, with token
    gradients.

    The ratio is the geometric mean over the tokens of `sequence_ratio_mask`, by default those with nonzero advantages.
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
