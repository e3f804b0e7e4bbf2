"""Batches from several replay buffers with fixed shares, such as half from demonstrations (RLPD)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from recipes.embodied.replay.buffer import ReplayBuffer
from recipes.embodied.replay.replay_types import ReplayBatch, ReplayError, joined


class ReplayMixture:
    """Several sources of transitions, each with its share of every batch.

    Args:
        buffers: the buffers by the name of the source, as in `online`, `demonstrations`, `interventions`.
        shares: the shares of each, at least 0, not all of them 0; only their proportions count.

    Raises:
        ReplayError: the shares are not those of the buffers, or there are none.
    """

    def __init__(self, buffers: Mapping[str, ReplayBuffer], shares: Mapping[str, float]) -> None:
        wrong = set(buffers) != set(shares) or min(shares.values(), default=0) < 0 or not sum(shares.values())
        if wrong:
            raise ReplayError(f"the shares {dict(shares)} are not those of {', '.join(buffers)}")
        self.buffers, self.shares = dict(buffers), dict(shares)

    def __len__(self) -> int:
        return sum(len(buffer) for buffer in self.buffers.values())

    def counts(self, total: int) -> dict[str, int]:
        """Return the number of transitions per source: its share of `total`, exact where that is an integer.

        Others are rounded by largest remainders. What a source without transitions cannot give, the others do.
        """
        shares = {name: share for name, share in self.shares.items() if share and len(self.buffers[name])}
        if not shares:
            # None of those with a share has anything: any other does.
            shares = {name: 1.0 for name, buffer in self.buffers.items() if len(buffer)}
        if not shares:
            raise ReplayError("nothing can be sampled from empty replay buffers")
        whole = sum(shares.values())
        exact = {name: total * share / whole for name, share in shares.items()}
        counts = {name: int(count + 1e-9) for name, count in exact.items()}
        by_rest = sorted(exact, key=lambda name: counts[name] - exact[name])
        for name in by_rest[: total - sum(counts.values())]:
            counts[name] += 1
        return {name: counts.get(name, 0) for name in self.buffers}

    def sample(self, count: int, random: np.random.Generator, steps: int, discount: float) -> ReplayBatch:
        """Draw a batch; the rows of each source are together, in the order of the buffers. See `ReplayBuffer`."""
        parts: list[ReplayBatch] = []
        for name, number in self.counts(count).items():
            if number:
                parts.append(self.buffers[name].gather(self.buffers[name].sample(number, random), steps, discount))
        return joined(parts)
