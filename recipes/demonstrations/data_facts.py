"""Facts of demonstrations and of environments, to be compared before the first episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.demonstrations import Demonstrations
from recipes.demonstrations.names import camera_like


class DataFacts(NamedTuple):
    """The facts of demonstrations.

    Attributes:
        where: their files or folders.
        fps: rows per second; None: not recorded.
        instructions: the distinct instructions of the rows.
        reads_instructions: whether the policy that learns from the data is conditioned on instructions.
        cameras: the data's camera for each camera of the environment.
        guessed: the environment's cameras paired by a guess: either side has one camera, and their names differ.
        actions: min, max, mean and standard deviation of each action dimension; empty for discrete actions.
    """

    where: str
    fps: float | None
    instructions: tuple[str, ...]
    reads_instructions: bool
    cameras: Mapping[str, str]
    guessed: tuple[str, ...]
    actions: tuple[tuple[float, float, float, float], ...]


class StartFacts(NamedTuple):
    """The facts of the first starts of environments.

    Attributes:
        control_hz: actions per second; None: unknown.
        instructions: the instructions of the first starts; None: the environments observe none, or, like a real arm, do
            not start before their first episode.
    """

    control_hz: float | None
    instructions: tuple[str, ...] | None


def facts_of(
    data: Demonstrations, cameras: Mapping[str, str], named: Mapping[str, str], *, reads_instructions: bool = False
) -> DataFacts:
    """Return the facts of demonstrations.

    Args:
        data: the demonstrations.
        cameras: the data's camera for each camera of the environment.
        named: the pairs of cameras that `data.cameras` names.
        reads_instructions: whether the policy that learns from the data is conditioned on instructions.
    """
    numbers: list[int] = np.unique(data.task_of).tolist()
    chooses = data.actions.dtype.kind in "iu"
    values: NDArray[np.float64] = data.actions[:, : 0 if chooses else None].astype(np.float64)
    columns = zip(*(of(values, axis=0).tolist() for of in (np.min, np.max, np.mean, np.std)), strict=True)
    return DataFacts(
        data.where,
        data.fps,
        tuple(data.tasks[index] for index in numbers),
        reads_instructions,
        dict(cameras),
        tuple(name for name, theirs in cameras.items() if name not in named and camera_like(name, [theirs]) is None),
        tuple(columns),
    )
