"""An environment of your own: a point in a plane that has to reach a mark.

In this folder, `python own_environment.py` checks what recipes rely on, and `rlinf train own_environment.yaml` trains a
policy in it by PPO.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recipes.embodied import EnvSettings, EnvSpec, Starts, Transition, VectorEnv, check_env

STEP, NEAR = 0.2, 0.1


class Reach(VectorEnv):
    """Many points at once, each with a mark of its own. An action is a step, at most `STEP` along each axis."""

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        self._points = np.zeros((self.num_envs, 2))
        self._marks = np.zeros((self.num_envs, 2))

    @property
    def spec(self) -> EnvSpec:
        """Sizes of an observation and of an action."""
        return EnvSpec(state_size=4, action_size=2)

    def _start(self, rows: NDArray[np.intp], starts: Starts) -> None:
        # All randomness comes from `starts`, so that a resumed run goes on as it would have.
        drawn = 2 * starts.uniform(4) - 1
        self._points[rows], self._marks[rows] = drawn[:, :2], drawn[:, 2:]

    def _advance(self, actions: NDArray[np.float32], rows: NDArray[np.intp] | None) -> Transition:
        moved = slice(None) if rows is None else rows  # the episodes of the others have ended
        before = self._distances()
        self._points[moved] += STEP * np.clip(actions[moved], -1, 1)
        after = self._distances()
        near = after < NEAR
        return Transition(rewards=(before - after + near).astype(np.float32), terminations=near, successes=near)

    def _observe(self) -> dict[str, NDArray[np.float32]]:
        return {"states": np.concatenate((self._points, self._marks), axis=1).astype(np.float32)}

    def _distances(self) -> NDArray[np.float64]:
        return np.linalg.norm(self._points - self._marks, axis=1)


if __name__ == "__main__":
    check_env(Reach)
    print("the environment keeps every promise")
