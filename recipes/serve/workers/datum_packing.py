"""Data in packed rows whose positions predict given targets, and the share of a batch that a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from recipes.language.answers.answer_batch import balanced, token_budget_parts
from recipes.language.models.attention import PackedPlan, Segment
from recipes.language.models.packing import PackedRow
from recipes.serve.values import Datum


def pack_data(data: Sequence[Datum], device: torch.device | str = "cpu") -> PackedRow:
    """Lay data into one row, without padding; position n of a datum predicts its n-th targets, of which it may have K.

    The targets are in the order of data, positions and K.
    """
    starts = [0, *accumulate(len(datum.tokens) for datum in data)]
    positions: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    for datum, start in zip(data, starts, strict=False):
        wanted = torch.tensor(datum.values["target_tokens"])
        many = wanted.shape[1] if wanted.ndim == 2 else 1
        positions.append((torch.arange(len(wanted)) + start).repeat_interleave(many))
        targets.append(wanted.reshape(-1))
    segments = [Segment(start, len(datum.tokens)) for start, datum in zip(starts, data, strict=False)]
    return PackedRow(
        torch.cat([torch.tensor(datum.tokens) for datum in data])[None].to(device),
        PackedPlan(segments, device),
        torch.cat(positions).to(device),
        torch.cat(targets).to(device),
    )


def shares(data: Sequence[Datum], world_size: int, rank: int, max_tokens: int) -> list[list[int]]:
    """Return the micro-batches of a rank's share of a batch, by the numbers of data; there may be none.

    Args:
        data: the batch of all ranks together.
        world_size, rank: the number of ranks, and the rank of this process.
        max_tokens: the most tokens of a micro-batch; a datum above it is one by itself.
    """
    costs = [len(datum.tokens) for datum in data]
    mine = balanced(costs, world_size)[rank]
    parts = token_budget_parts([costs[number] for number in mine], max_tokens) if len(mine) else []
    return [[mine[place] for place in part] for part in parts]
