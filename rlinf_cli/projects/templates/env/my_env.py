"""An environment: carts on a line, each of which has to stop at the mark in its middle."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recipes.embodied import EnvSettings, EnvSpec, Starts, Transition, VectorEnv

SECONDS, FORCE, NEAR = 0.1, 2.0, 0.1


class Cart(VectorEnv):
    """`num_envs` carts, stepped together. An action from -1 to 1 pushes one."""

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        self._place = np.zeros(self.num_envs)
        self._speed = np.zeros(self.num_envs)

    @property
    def spec(self) -> EnvSpec:
        """Sizes of an observation and of an action."""
        return EnvSpec(state_size=2, action_size=1)

    def _start(self, rows: NDArray[np.intp], starts: Starts) -> None:
        # All randomness comes from `starts`, so that a run can be resumed and repeated.
        self._place[rows] = 2 * starts.uniform(1)[:, 0] - 1
        self._speed[rows] = 0

    def _advance(self, actions: NDArray[np.float32], rows: NDArray[np.intp] | None) -> Transition:
        moved = slice(None) if rows is None else rows  # the episodes of the other carts have ended
        before = np.hypot(self._place, self._speed)
        self._speed[moved] += SECONDS * FORCE * np.clip(actions[moved, 0], -1, 1)
        self._place[moved] += SECONDS * self._speed[moved]
        after = np.hypot(self._place, self._speed)
        solved = after < NEAR  # at the mark, and slow
        return Transition(rewards=(before - after + solved).astype(np.float32), terminations=solved, successes=solved)

    def _observe(self) -> dict[str, NDArray[np.float32]]:
        # A new array at each call: the policy keeps what it got.
        return {"states": np.stack((self._place, self._speed), axis=1).astype(np.float32)}

    # What `rlinf eval --play` shows.
    def look(self, rows: NDArray[np.intp]) -> dict[str, NDArray[np.float64]]:
        """Return the place of each cart, for a video."""
        return {"place": self._place[rows]}

    def picture(self, seen: dict[str, NDArray[np.float64]]) -> NDArray[np.uint8]:
        """Return a picture of each cart and the mark, uint8 [n, 40, 200, 3]."""
        pictures = np.full((len(seen["place"]), 40, 200, 3), 255, np.uint8)
        pictures[:, :, 99:101] = 160
        for picture, column in zip(pictures, (100 + 50 * seen["place"]).clip(6, 194).astype(int), strict=True):
            picture[14:26, column - 6 : column + 6] = (0, 114, 178)
        return pictures

    # What a step depends on, so that a resumed run continues its episodes.
    def _save(self) -> dict[str, NDArray[np.float64]]:
        return {"place": self._place, "speed": self._speed}

    def _load(self, state: dict[str, NDArray[np.float64]]) -> None:
        self._place, self._speed = state["place"].copy(), state["speed"].copy()
