"""Random seeds by step, rank and purpose, independent of earlier draws.

A worker reseeds torch in every step. A resumed run therefore draws the same numbers, and no generator state is saved.
"""

from __future__ import annotations

from enum import IntEnum
from hashlib import blake2b


class Purpose(IntEnum):
    """A use of random numbers; no two uses share a seed.

    A worker reseeds torch in every step. A resumed run therefore draws the same numbers, and no generator state is
    saved.
    """

    WEIGHTS = 0
    ACTIONS = 1
    BATCHES = 2
    EVALUATION = 3


def derive_seed(seed: int, purpose: Purpose, step: int = 0, rank: int = 0) -> int:
    """Return a seed for `torch.manual_seed`, from 0 to below 2^63, hashed from all arguments."""
    text = f"{seed} {int(purpose)} {step} {rank}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1
