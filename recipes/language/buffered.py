"""Groups of answers that wait to be learned from, in a checkpoint."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from recipes.language.batch import RolloutBatch
from rlinf_core import Channel, CheckpointError

_FILE: Final = "buffered.pt"


def save_buffered(channel: Channel, slots: tuple[int, ...], folder: Path) -> None:
    """Write the groups that a channel holds under the keys `slots`, and leave them there."""
    groups: dict[str, dict[str, Tensor]] = {}
    for slot in slots:
        (batch,) = channel.peek_all(key=str(slot))
        groups[str(slot)] = {each.name: getattr(batch, each.name) for each in fields(RolloutBatch)}
    torch.save(groups, folder / _FILE)


def load_buffered(channel: Channel, slots: tuple[int, ...], folder: Path) -> None:
    """Put groups that `save_buffered` wrote into a channel, under the keys `slots`.

    Raises:
        CheckpointError: the file is missing or damaged, or lacks a group.
    """
    file = folder / _FILE
    try:
        groups: dict[str, dict[str, Tensor]] = torch.load(file, weights_only=True)
        batches = {slot: RolloutBatch(**groups[str(slot)]) for slot in slots}
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "the checkpoint lacks groups of answers that wait to be learned from",
            where=str(file),
            why=str(error) or type(error).__name__,
            help="continue from another checkpoint",
        ) from None
    for slot, batch in batches.items():
        channel.put(batch, weight=int(batch.lengths.sum()), key=str(slot))
