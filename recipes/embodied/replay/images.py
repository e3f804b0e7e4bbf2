"""Images of a replay buffer, each compressed once when it is stored: by differences of neighbouring pixels, and zlib.

Nothing is lost. Pictures that are drawn take a tenth of their bytes, noise takes all of them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.replay.replay_types import Rows
from recipes.training.arrays import Array

# The fastest; on differences of pixels the slow ones gain little.
_LEVEL: Final = 1


class CompressedImages:
    """A column of images, uint8 [rows, H, W, channels].

    Args:
        rows: the maximum number of images.
        shape: (H, W, channels).

    Attributes:
        nbytes: bytes of what is held, compressed.
    """

    def __init__(self, rows: int, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.dtype = np.dtype(np.uint8)
        self._held: list[bytes] = [b""] * rows
        self.nbytes = 0

    def __setitem__(self, rows: Rows, images: Array) -> None:
        """Store images [n, H, W, channels] in some rows."""
        for row, image in zip(rows.tolist(), images, strict=True):
            self._put(row, compressed(image))

    def __getitem__(self, rows: Rows) -> NDArray[np.uint8]:
        """Return the images of some rows, [n, H, W, channels]; black ones where none is held."""
        images = np.zeros((len(rows), *self.shape), np.uint8)
        held = [self._held[int(row)] for row in rows]
        for image, data in zip(images, held, strict=True):
            if data:
                image[:] = decompressed(data, self.shape)
        return images

    def drop(self, rows: Rows) -> None:
        """Forget the images of some rows."""
        for row in rows.tolist():
            self._put(row, b"")

    def _put(self, row: int, data: bytes) -> None:
        self.nbytes += len(data) - len(self._held[row])
        self._held[row] = data

    def save(self) -> dict[str, Array]:
        """Return all images as arrays: their concatenated bytes, and the size of each."""
        sizes = np.array([len(data) for data in self._held], np.int64)
        return {"bytes": np.frombuffer(b"".join(self._held), np.uint8), "sizes": sizes}

    def load(self, state: Mapping[str, Array]) -> None:
        """Take what `save` returned."""
        data, ends = state["bytes"].tobytes(), np.cumsum(state["sizes"]).tolist()
        self._held = [data[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        self.nbytes = len(data)


def compressed(image: Array) -> bytes:
    """Return an image, uint8 [H, W, channels], as fewer bytes."""
    # Differences wrap around, as bytes do; the first pixel of a row is kept.
    differences = np.diff(image, axis=1, prepend=np.zeros_like(image[:, :1]))
    return zlib.compress(differences.tobytes(), _LEVEL)


def decompressed(data: bytes, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return the image of `compressed`.

    Raises:
        ValueError, zlib.error: it is no such image.
    """
    # No more than the shape needs, whatever was compressed.
    differences = np.frombuffer(zlib.decompressobj().decompress(data, math.prod(shape) + 1), np.uint8).reshape(shape)
    return np.cumsum(differences, axis=1, dtype=np.uint8)
