"""An environment of Gymnasium: a cart on a line that has to stop at the mark in its middle."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray


class CartEnv(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """A cart that is pushed by an action from -1 to 1.

    Args:
        force: acceleration at full push; `env.train.options.force` of the job.
    """

    observation_space = spaces.Box(-10, 10, (2,), np.float32)  # place and speed
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, force: float = 2.0) -> None:
        self._force = force
        self._state = np.zeros(2, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Put the cart at rest somewhere."""
        super().reset(seed=seed)  # all randomness comes from `np_random`, so that a run can be repeated
        self._state = np.array([self.np_random.uniform(-1, 1), 0], np.float32)
        return self._state.copy(), {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Push the cart for a tenth of a second."""
        place, speed = map(float, self._state)
        before = float(np.linalg.norm(self._state))
        speed = speed + 0.1 * self._force * float(action[0])
        self._state = np.array([place + 0.1 * speed, speed], np.float32).clip(-10, 10)
        after = float(np.linalg.norm(self._state))
        solved = after < 0.1  # at the mark, and slow
        return self._state.copy(), before - after + solved, solved, False, {"is_success": solved}
