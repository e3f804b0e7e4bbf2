"""The actions that were carried out in a chunk, and by whom they were chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.interventions.intervention import InterventionError, InterventionSource, Verdict


class ExecutedActions:
    """Replaces the policy's actions by those of a source, step by step of a chunk, and keeps what was carried out.

    Where a source let go within a chunk the rest of it is not the policy's: that was chosen before the environment was
    moved by somebody else. Such an environment is told to stand still, by an action of zeros, until the next chunk.

    Args:
        chunk: [B, C, A], the policy's.
        source: None: nobody intervenes.

    Attributes:
        actions: [B, C, A], what was carried out.
        taken: bool [B, C], the steps in which the source acted.
    """

    def __init__(self, chunk: NDArray[Any], source: InterventionSource | None) -> None:
        self.actions = chunk.copy()
        self.taken = np.zeros(chunk.shape[:2], np.bool_)
        self._source = source
        self._verdicts: dict[int, Verdict] = {}

    def take(self, index: int) -> NDArray[Any]:
        """Return the actions [B, A] to carry out in a step.

        Raises:
            InterventionError: an action of the source is not finite, or it was lost.
        """
        self._verdicts = {}
        found = None if self._source is None else self._source.read()
        if index:
            self.actions[self.taken[:, :index].any(axis=1), index] = 0
        if found is not None:
            wanted = found.actions[found.rows]
            if not np.isfinite(wanted).all():
                raise InterventionError(
                    "an intervention is not finite",
                    where=type(self._source).__name__,
                    help="repair the source; nothing was carried out",
                )
            self.actions[found.rows, index] = np.clip(wanted, -1, 1)
            self.taken[:, index] = found.rows
            self._verdicts = found.verdicts
        return self.actions[:, index]

    def replace(self, index: int, actions: NDArray[Any]) -> None:
        """Keep what an environment says was carried out in a step instead, [B, A]."""
        self.actions[:, index] = actions

    @property
    def verdicts(self) -> dict[int, Verdict]:
        """Judgements of the step that was last taken, by row."""
        return self._verdicts
