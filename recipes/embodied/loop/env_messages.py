"""Messages between env workers and rollout workers: arrays by name. No torch, which interpreters of simulators lack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np

# The results of a step, by their names in `StepResult`; each [B, C].
OUTCOME = ("rewards", "terminations", "truncations", "valid")
# In messages of environments in which not only the policy acts: the actions that were carried out [B, C, A], and which
# of them somebody else chose, bool [B, C].
EXECUTED = "executed"
INTERVENTIONS = "interventions"
# In messages of environments whose simulators failed: bool [B], see `StepResult`.
FAILED = "failed"
# Counts in sums of episodes, without a mean: those that were left out because their simulators failed, those that count
# and failed by an error of the environment, and all such errors.
FAILED_EPISODES = "failed/simulator"
ERRED_EPISODES = "env_errors"
ALL_ERRORS = "all_env_errors"
# In the first message of a pass: how many chunks of actions it has, the same number for each environment, int64 [B].
CHUNKS = "chunks"


def stacked(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Messages of several workers as one: arrays and observations concatenated along environments."""
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
    """Rows `start` to `stop` of a message of `total` environments."""
    if (start, stop) == (0, total):
        return message
    return {
        name: sliced(cast("dict[str, Any]", value), start, stop, total)
        if isinstance(value, dict)
        else value[start:stop]
        for name, value in message.items()
    }
