"""Facts of demonstrations and of environments, as they are compared before the first episode."""

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
        fps: rows per second; None: they do not say.
        instructions: the different instructions of their rows.
        reads_instructions: the policy that learns from them acts by instructions.
        cameras: their camera for each of the environment's.
        guessed: the environment's cameras whose pair is a guess: it is the only one on both sides, of another name.
        actions: smallest and largest value, mean and standard deviation of each number of an action; of choices none.
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
        control_hz: actions per second; None: not known.
        instructions: those of their first starts; None: they observe none, or are not started before their first
            episode, as a real arm.
    """

    control_hz: float | None
    instructions: tuple[str, ...] | None


def facts_of(
    data: Demonstrations, cameras: Mapping[str, str], named: Mapping[str, str], *, reads_instructions: bool = False
) -> DataFacts:
    """Return the facts of demonstrations.

    Args:
        data: the demonstrations.
        cameras: their camera for each of the environment's.
        named: the pairs of cameras that `data.cameras` names.
        reads_instructions: the policy that learns from them acts by instructions.
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
