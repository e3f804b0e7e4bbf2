"""A person for tests, who moves an arm in every third step of an episode: which ones depends on the arm."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.interventions.intervention import InterventionSource, Takeover


def steered(steps: NDArray[np.integer], env: int) -> NDArray[np.bool_]:
    """Return in which steps of an episode they move the arm of environment `env`."""
    return (steps + env) % 3 == 0


class EveryThird(InterventionSource):
    """A small motion of all joints in `steered` steps."""

    def read(self) -> Takeover | None:
        """See `InterventionSource`."""
        progress = self.env.progress
        if not steered(progress.steps, int(progress.numbers[0]))[0]:
            return None
        return Takeover(np.array([True]), np.full((1, self.env.action_size), 0.1, np.float32), {})
