"""Examples in packed rows, and the share of a batch that a rank has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recipes.language.answers.answer_batch import balanced, token_budget_parts
from recipes.language.models.attention import PackedPlan, Segment
from recipes.language.models.packing import PackedRow
from recipes.sft_chat.examples import ChatExample


def pack_examples(examples: Sequence[ChatExample], device: torch.device | str = "cpu") -> PackedRow:
    """Lay examples into one row, without padding; its targets are the tokens that are trained on.

    The last token of an example predicts nothing and is left out. Without examples the row is one token without
    targets, so that a rank computes as many passes as the others.
    """
    rows = [example for example in examples if len(example.tokens) > 1]
    if not rows:
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        plan = PackedPlan([Segment(0, 1)], device)
        return PackedRow(torch.zeros((1, 1), dtype=torch.int64, device=device), plan, nothing, nothing)
    lengths = [len(example.tokens) - 1 for example in rows]
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    tokens = torch.cat([example.tokens[:-1] for example in rows]).long()
    following = torch.cat([example.tokens[1:] for example in rows]).long()
    predictors = torch.cat([example.trained[1:] for example in rows]).nonzero()[:, 0]
    return PackedRow(
        tokens[None].to(device),
        PackedPlan([Segment(start, length) for start, length in zip(starts, lengths, strict=True)], device),
        predictors.to(device),
        following[predictors].to(device),
    )


def micro_batches(
    lengths: Sequence[int], chosen: Sequence[int], world_size: int, rank: int, max_tokens: int
) -> list[list[int]]:
    """Return the micro-batches of a rank's share of a batch, by the numbers of examples; some are empty.

    Shares have about as many tokens, and every rank has as many micro-batches: ranks compute that without a message.

    Args:
        lengths: tokens of all examples.
        chosen: the batch of all ranks together.
        world_size, rank: the number of ranks, and the rank of this process.
        max_tokens: the most tokens of a micro-batch; an example above it is one by itself.
    """
    costs = [lengths[number] for number in chosen]
    shares = balanced(costs, world_size)
    divided = [token_budget_parts([costs[place] for place in share], max_tokens) for share in shares]
    count = max(1, *(len(parts) for parts in divided))
    mine = [[chosen[shares[rank][place]] for place in part] for part in divided[rank]]
    return mine + [[] for _ in range(count - len(mine))]
