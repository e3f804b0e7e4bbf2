"""Errors of an environment's own code: those that come again from the same seed and the same actions."""

from __future__ import annotations

from typing import Final

from recipes.embodied.envs.env_spec import EnvError
from recipes.embodied.envs.faults.repeating import SimulatorError
from rlinf_core.runners.failure_list import position

# Starts that are tried in the place of one whose reset raises.
MOST_STARTS: Final = 6


def env_error(episode: str, error: SimulatorError, *, began: bool = True) -> EnvError:
    """Return the record of an error that came twice."""
    cause = error.__cause__
    return EnvError(episode, " ".join(error.message.split()), (cause and position(cause)) or "", began)
