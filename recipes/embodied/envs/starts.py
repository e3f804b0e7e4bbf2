"""Random numbers for episode starts, each a function of where it is used.

A stateful generator would give other starts after a redistribution of environments over workers, or after an earlier
end of an episode. Here a start depends only on (seed, group, reset, episode), through the finalizer of SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): a counter goes in, 64 well mixed bits
come out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Constants of numpy's type: each is used for every episode, and made in as much time as a sum takes.
_GOLDEN, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_1, _27, _30, _31, _33 = (np.uint64(n) for n in (1, 27, 30, 31, 33))


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> _30)) * _FIRST
    value = (value ^ (value >> _27)) * _SECOND
    return value ^ (value >> _31)


def _absorb(state: NDArray[np.uint64], value: NDArray[np.int64]) -> NDArray[np.uint64]:
    return _mix(state + _GOLDEN * (value.astype(np.uint64) + _1))


class Starts:
    """The random numbers of episode starts.

    Args:
        seed: the seed of the environments.
        groups: int64 [B], the group of each environment; members of a group have equal starts.
    """

    def __init__(self, seed: int, groups: NDArray[np.int64]) -> None:
        first = _mix(np.full(groups.shape, seed, np.uint64) + _GOLDEN)
        self._groups = _absorb(first, groups)
        self._keys = self._groups

    def begin(self, reset: int) -> None:
        """Begin the episodes after the reset with this number."""
        self._keys = _absorb(self._groups, np.full(self._groups.shape, reset))

    def of(self, rows: NDArray[np.int64], episodes: NDArray[np.int64]) -> Starts:
        """Return the starts of the episodes with these numbers in these environments."""
        part = object.__new__(Starts)
        part._groups = self._groups[rows]
        part._keys = _absorb(self._keys[rows], episodes)
        return part

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Return [rows, count] numbers from 0 to below 1; the same on each call."""
        bits = _absorb(self._keys[:, None], np.arange(count))
        return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def seeds(self) -> list[int]:
        """Return a seed for each row, from 0 to below 2^31, for environments that draw by themselves."""
        return (self._keys >> _33).tolist()
