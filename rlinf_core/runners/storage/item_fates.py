"""The fates of items that were buffered or in flight when a checkpoint was written: prompts, rollouts, episodes.

A checkpoint lists them in its manifest, as it can bring them back; a run that goes on from it reports what became of
each, which differs where it may use less of what is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeAlias


class ItemFate(StrEnum):
    """The fate of an item."""

    RESTORED = "restored"
    """It was done, and is used as it is."""
    CONTINUED = "continued"
    """It goes on where it was."""
    AGAIN = "done again"
    """It begins anew; what there was of it is lost."""
    WAITING = "not yet asked"
    """It was set aside, and nobody had begun it."""
    DROPPED = "left out"
    """It is neither kept nor done again."""


ItemFates: TypeAlias = Mapping[str, Sequence[str]]
"""The items of each fate, each named as in `prompt 17 for step 5`."""


def item_fates(items: Iterable[tuple[ItemFate, str]]) -> ItemFates:
    """Return items by their fates, in order; fates without an item are left out."""
    by_fate: dict[str, list[str]] = {}
    for fate, name in items:
        by_fate.setdefault(fate.value, []).append(name)
    return {fate.value: by_fate[fate.value] for fate in ItemFate if fate.value in by_fate}


def fates_line(fates: ItemFates) -> str:
    """Return `in flight at the checkpoint: 4 restored, 2 continued, 1 done again, 3 not yet asked`."""
    counts = ", ".join(f"{len(items)} {fate}" for fate, items in fates.items())
    return f"in flight at the checkpoint: {counts}"
