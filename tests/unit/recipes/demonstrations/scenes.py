"""Pictures of a scene that is another one upside down and another one in a mirror."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def scenes(count: int, seed: int, *, size: int = 48, mirrored_alike: bool = False) -> NDArray[np.uint8]:
    """Return pictures [n, size, size, 3] of a dark wall, a bright table, an arm, and a block that lies anywhere.

    Args:
        count: n.
        seed: of the places of the block.
        size: of the pictures.
        mirrored_alike: the arm is in the middle and there is no block.
    """
    random = np.random.default_rng(seed)
    pictures = np.full((count, size, size, 3), 60, np.uint8)
    pictures[:, size // 3 :] = (200, 170, 120)
    left = (size - size // 6) // 2 if mirrored_alike else size // 8
    pictures[:, : size * 2 // 3, left : left + size // 6] = (230, 230, 240)
    block = size // 8
    for item in pictures if not mirrored_alike else ():
        row, column = random.integers(size // 3, size - block), random.integers(0, size - block)
        item[row : row + block, column : column + block] = (180, 20, 20)
    noise = random.normal(0, 4, pictures.shape)
    return np.clip(pictures + noise, 0, 255).astype(np.uint8)
