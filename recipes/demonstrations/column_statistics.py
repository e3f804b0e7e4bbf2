"""Column statistics in LeRobot's format: mean, standard deviation, range and quantiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recipes.training.arrays import Array

QUANTILES: Final[Mapping[str, float]] = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
# By name: mean, std, min, max, count and quantiles. Of numbers [D], of pictures [3, 1, 1] with values from 0 to 1.
Statistics: TypeAlias = dict[str, Array]


def of_numbers(rows: Array) -> Statistics:
    """Return statistics of rows [N, ...], elementwise; with the population standard deviation."""
    values = rows.astype(np.float64).reshape(len(rows), *(rows.shape[1:] or (1,)))
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=0)
    return {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
        "count": np.array([len(rows)]),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }


class PictureStatistics:
    """Image statistics by color, from exact counts of the 256 values."""

    def __init__(self) -> None:
        self._counts = np.zeros((3, 256), np.int64)
        self._pictures = 0

    def add(self, pictures: NDArray[np.uint8]) -> None:
        """Add pictures [N, H, W, 3]."""
        self._pictures += len(pictures)
        for channel in range(3):
            self._counts[channel] += np.bincount(pictures[..., channel].ravel(), minlength=256)

    def merge(self, other: PictureStatistics) -> None:
        """Add the pictures of another."""
        self._counts += other._counts
        self._pictures += other._pictures

    def statistics(self) -> Statistics:
        """Return the statistics of values scaled to 0 to 1, each [3, 1, 1]."""
        levels = np.arange(256) / 255
        total = self._counts.sum(axis=1)
        mean = (self._counts * levels).sum(axis=1) / total
        variance = (self._counts * levels**2).sum(axis=1) / total - mean**2
        reached = self._counts.cumsum(axis=1) / total[:, None]
        present = self._counts > 0
        values = {
            "min": levels[present.argmax(axis=1)],
            "max": levels[255 - present[:, ::-1].argmax(axis=1)],
            "mean": mean,
            "std": np.sqrt(np.maximum(variance, 0)),
            **{name: levels[(reached >= share).argmax(axis=1)] for name, share in QUANTILES.items()},
        }
        return {**{name: value.reshape(3, 1, 1) for name, value in values.items()}, "count": np.array([self._pictures])}
