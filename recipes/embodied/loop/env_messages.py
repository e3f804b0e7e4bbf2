"""Messages between env workers and rollout workers: arrays by name. Imports no torch, which simulators' interpreters
lack.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np

# The results of a step, by their names in `StepResult`; each [B, C].
OUTCOME = ("rewards", "terminations", "truncations", "valid")
# In messages of environments with interventions or altered actions: the executed actions [B, C, A], and which of them
# somebody else chose, bool [B, C].
EXECUTED = "executed"
INTERVENTIONS = "interventions"
# In messages of environments whose simulators failed: bool [B], see `StepResult`.
FAILED = "failed"
# Counts in episode sums, without a mean: episodes dropped because their simulators failed, episodes that count as
# failed by an error of the environment, and all such errors.
FAILED_EPISODES = "failed/simulator"
ERRED_EPISODES = "env_errors"
ALL_ERRORS = "all_env_errors"
# Folder of a checkpoint that holds the state of the environments, a file for each env worker.
EPISODES = "env"
# In the first message of a rollout segment: its number of action chunks, equal for all environments, int64 [B].
CHUNKS = "chunks"


def stacked(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return messages of several workers as one, concatenated along environments."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _stack([part.get(name) for part in parts]) for name in names}


def _stack(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return stacked(cast("list[dict[str, Any]]", values))
    return np.concatenate(values)


def sliced(message: dict[str, Any], start: int, stop: int, total: int) -> dict[str, Any]:
    """Return rows `start` to `stop` of a message of `total` environments."""
    if (start, stop) == (0, total):
        return message
    return {
        name: sliced(cast("dict[str, Any]", value), start, stop, total)
        if isinstance(value, dict)
        else value[start:stop]
        for name, value in message.items()
    }
