"""Frames of whole episodes, recorded in env workers for videos. Imports only numpy, which every interpreter has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import BoolArray
from recipes.embodied.envs.env_state import State

# The frames of a video per second, each of one action, and the episodes that it shows side by side.
FPS: Final = 20
EPISODES: Final = 9
# Bytes of frames that one batch of environments keeps; if that is too little, only its first environments are filmed.
_BUDGET: Final = 256 * 2**20
# The assumed steps of an episode without a limit.
_UNLIMITED: Final = 1000


class EpisodeFrames(NamedTuple):
    """Frames of one episode.

    Attributes:
        env: number of the environment within the job.
        reset: number of the reset that began it.
        outcome: how it ended: `success`, a failure by its name, `time out`.
        frames: uint8 [T + 1, H, W, 3], from the start to the last state.
    """

    env: int
    reset: int
    outcome: str
    frames: NDArray[np.uint8]


class FrameRecorder:
    """The frames of the episodes since a reset, one episode per environment.

    Args:
        batch: the batch, which has just been reset.
        reset: number of the reset.
        budget: bytes of frames, see `_BUDGET`.

    Attributes:
        sees: whether the environment has images to show.

    Raises:
        EnvContractError: see `TaskMethods.picture`.
    """

    def __init__(self, batch: VectorEnv, reset: int, budget: int = _BUDGET) -> None:
        self._batch, self._reset = batch, reset
        self._rows = np.arange(0)
        first = batch.look(np.arange(1))
        self.sees = first is not None
        if first is None:
            return
        batch.picture(first)  # raises for what no video takes, now rather than after the episodes
        one = sum(array.nbytes for array in first.values()) * (1 + (batch.max_episode_steps or _UNLIMITED))
        self._rows = np.arange(min(batch.num_envs, max(1, budget // one)))
        # The data of each step, and their rows.
        self._seen: list[tuple[NDArray[np.int64], State]] = []
        self._outcomes: dict[int, str] = {}
        self._take(self._rows)
        batch.watcher = self._watch

    def _watch(self, stepped: BoolArray, terminated: BoolArray, truncated: BoolArray) -> None:
        running = np.array([row for row in self._rows.tolist() if row not in self._outcomes and stepped[row]], np.int64)
        if not len(running):
            return
        self._take(running)
        over = running[(terminated | truncated)[running]]
        if len(over):
            outcomes = self._batch.outcomes(over, ~terminated[over])
            self._outcomes |= dict(zip(over.tolist(), outcomes, strict=True))

    def _take(self, rows: NDArray[np.int64]) -> None:
        seen = self._batch.look(rows)
        if seen is None:
            raise RuntimeError("`look` returned an image before, and returns none now")
        self._seen.append((rows, seen))

    def finish(self, most: int) -> list[EpisodeFrames]:
        """Return the finished episodes, at most `most` of each outcome, and stop recording."""
        if not self.sees:
            return []
        self._batch.watcher = None
        numbers = self._batch.numbers
        chosen = selected([(self._outcomes[row], row) for row in sorted(self._outcomes)], most)
        return [EpisodeFrames(int(numbers[row]), self._reset, self._outcomes[row], self._frames(row)) for row in chosen]

    def _frames(self, row: int) -> NDArray[np.uint8]:
        steps = [{name: array[rows == row] for name, array in seen.items()} for rows, seen in self._seen if row in rows]
        return self._batch.picture({name: np.concatenate([step[name] for step in steps]) for name in steps[0]})


def selected(outcomes: Iterable[tuple[str, int]], most: int) -> list[int]:
    """Return the numbers of the first episodes of each outcome, at most `most` of each."""
    counts: dict[str, int] = {}
    chosen: list[int] = []
    for outcome, number in outcomes:
        counts[outcome] = counts.get(outcome, 0) + 1
        if counts[outcome] <= most:
            chosen.append(number)
    return chosen
