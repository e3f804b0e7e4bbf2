"""A sum tree: sampling in proportion to priorities, in logarithmic time (Schaul et al. 2016, arXiv 1511.05952, B.2.1).

The leaves hold priorities, every inner node the sum of its two children; the root is the total.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.replay.replay_types import Rows


class SumTree:
    """Priorities of `size` items, none at first.

    Args:
        size: number of items.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._leaves = 1 << max(0, size - 1).bit_length()
        # Node i has the children 2 i and 2 i + 1; the root is 1.
        self._nodes = np.zeros(2 * self._leaves)

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._nodes[1])

    @property
    def priorities(self) -> NDArray[np.float64]:
        """float64 [size], of all items; a copy."""
        return self._nodes[self._leaves : self._leaves + self.size].copy()

    def get(self, items: Rows) -> NDArray[np.float64]:
        """Return the priorities of some items, float64 [n]."""
        return self._nodes[self._leaves + items]

    def set(self, items: Rows, priorities: NDArray[np.float64]) -> None:
        """Set priorities of items, float64 [n], at least 0; for duplicates the last one counts."""
        self._nodes[self._leaves + items] = priorities
        nodes = np.unique(self._leaves + items) >> 1
        while len(nodes) and nodes[0]:
            # Sums are recomputed from the children, so that no error accumulates over a long run.
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]
            nodes = np.unique(nodes >> 1)

    def find(self, positions: NDArray[np.float64]) -> Rows:
        """Return the items at positions between 0 and `total`, as if priorities lay end to end, int64 [n].

        An item without priority is never returned, as long as the total is above 0.
        """
        nodes, left = np.ones(len(positions), np.int64), positions.astype(np.float64)
        while nodes.size and nodes[0] < self._leaves:
            first = 2 * nodes
            below = self._nodes[first]
            # Where rounding leads beyond the last priority, the other child is taken if this one is empty.
            right = (left >= below) & (self._nodes[first + 1] > 0)
            left = np.where(right, left - below, left)
            nodes = first + right
        return nodes - self._leaves
