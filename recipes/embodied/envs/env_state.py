"""Starts and states of environments, with which runs can be repeated and resumed within their episodes.

A worker packs the rows of its environments; a resumed worker reads its rows from all packs, so that environments may
have moved between workers. The format is numpy's own, read without pickle. A stateful generator would give other starts
after a redistribution of environments over workers, or after an earlier end of an episode. Here a start depends only on
(seed, group, reset, episode), through the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", 2014): a counter goes in, 64 well mixed bits come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from io import BytesIO
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.training.arrays import Array, read_arrays
from rlinf_core.foreign.budget import Budget

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


# Arrays [B, ...] by name, a row for each environment; `number` int64 [B] is the environment's number within the job.
State: TypeAlias = dict[str, Array]
_SETUP: Final = "setup"


def pack(states: Sequence[State], setup: str) -> bytes:
    """Return the states of several batches as bytes.

    Args:
        states: the states of batches with the same names.
        setup: the setup of the states (kind of environment, task, seed); `unpack` accepts no other.

    Raises:
        TypeError: an array holds Python objects, which only pickle could read again.
    """
    arrays = {_SETUP: np.array(setup), **_joined(states)}
    strange = next((name for name, array in arrays.items() if array.dtype.hasobject), None)
    if strange is not None:
        raise TypeError(f"`{strange}` holds Python objects; a state may only have numbers and texts")
    buffer = BytesIO()
    np.savez_compressed(buffer, **arrays)  # pyright: ignore[reportArgumentType] - a name is not an option of numpy's
    return buffer.getvalue()


def unpack(packs: Iterable[bytes], setup: str, numbers: NDArray[np.int64]) -> State | None:
    """Return the rows of the environments `numbers`, int64 [B], in that order.

    Returns:
        None if the packs belong to another setup, or lack one of the environments.

    Raises:
        ValueError, OSError, zipfile.BadZipFile: the bytes were not written by `pack`.
    """
    states: list[State] = []
    size = 0
    for content in packs:
        size += len(content)
        arrays: State = read_arrays(content)
        if str(arrays.pop(_SETUP)) != setup:
            return None
        states.append(arrays)
    if not states:
        return None
    budget = Budget.of_size(size, "environments")
    for name in states[0]:
        parts = [state[name] for state in states]
        longest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        budget.take_array([sum(map(len, parts)), *longest], max(part.itemsize for part in parts), f"`{name}`")
    joined = _joined(states)
    order = {int(number): row for row, number in enumerate(joined["number"])}
    if any(int(number) not in order for number in numbers):
        return None
    rows = [order[int(number)] for number in numbers]
    return {name: array[rows] for name, array in joined.items()}


def observation_digest(observations: Mapping[str, Array]) -> NDArray[np.uint8]:
    """Return a 16-byte digest of each environment's observation, uint8 [B, 16]."""
    arrays = [np.ascontiguousarray(array) for _, array in sorted(observations.items()) if array.dtype.kind in "fiub"]
    rows = zip(*arrays, strict=True)
    digests = [blake2b(b"".join(part.tobytes() for part in row), digest_size=16).digest() for row in rows]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)


def _joined(states: Sequence[State]) -> State:
    """Join batches; shorter rows are padded with zeros."""
    return {name: np.concatenate(_padded([state[name] for state in states])) for name in states[0]}


def _padded(arrays: list[Array]) -> list[Array]:
    shape = tuple(max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True))
    return [
        np.pad(array, [(0, 0), *((0, size - own) for size, own in zip(shape, array.shape[1:], strict=True))])
        for array in arrays
    ]
