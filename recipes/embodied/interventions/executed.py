"""The actions that were carried out in a chunk, and by whom they were chosen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.interventions.intervention import InterventionError, InterventionSource, Verdict
from recipes.training.arrays import Array


class ExecutedActions:
    """Replaces the policy's actions by a source's, step by step of a chunk, and records the executed ones.

    Where a source let go within a chunk the rest of it is not the policy's: that was chosen before the environment was
    moved by somebody else. Such an environment is held as it is until the next chunk.

    Args:
        chunk: [B, C, A], the policy's.
        source: None: no interventions.
        held: returns the actions [n, A] that hold some environments as they are, by their rows.

    Attributes:
        actions: [B, C, A], what was carried out.
        taken: bool [B, C], the steps in which the source acted.
    """

    def __init__(
        self, chunk: Array, source: InterventionSource | None, held: Callable[[NDArray[np.int64]], Array]
    ) -> None:
        self.actions = chunk.copy()
        self.taken = np.zeros(chunk.shape[:2], np.bool_)
        self._source, self._held = source, held
        self._verdicts: dict[int, Verdict] = {}
        self._rewards: dict[int, float] = {}

    def take(self, index: int) -> Array:
        """Return the actions [B, A] to carry out in a step.

        Raises:
            InterventionError: an action of the source is not finite, or it was lost.
        """
        self._verdicts, self._rewards = {}, {}
        taken_over = None if self._source is None else self._source.read()
        left = np.flatnonzero(self.taken[:, :index].any(axis=1))
        if len(left):
            self.actions[left, index] = self._held(left)
        if taken_over is not None:
            wanted = taken_over.actions[taken_over.rows]
            if not np.isfinite(wanted).all():
                raise InterventionError(
                    "an intervention action is not finite",
                    where=type(self._source).__name__,
                    help="fix the source; no action was executed",
                )
            self.actions[taken_over.rows, index] = np.clip(wanted, -1, 1)
            self.taken[:, index] = taken_over.rows
            self._verdicts, self._rewards = taken_over.verdicts, taken_over.rewards
        return self.actions[:, index]

    def replace(self, index: int, actions: Array) -> None:
        """Record the action that the environment executed in a step instead, [B, A]."""
        self.actions[:, index] = actions

    @property
    def verdicts(self) -> dict[int, Verdict]:
        """Verdicts on the last step, by row."""
        return self._verdicts

    @property
    def rewards(self) -> dict[int, float]:
        """The rewards that a person adds to those of the last step, by row."""
        return self._rewards
