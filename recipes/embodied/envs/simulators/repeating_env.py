"""An environment of a Gymnasium vector that is replaced where it raises, and whose episode is then repeated.

The vector itself cannot say which of its environments raised, so that this is done inside it.
"""

# Gymnasium is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any, Final

import gymnasium
import numpy as np

from recipes.embodied.envs.env_spec import BoolArray, EnvError
from recipes.embodied.envs.faults.env_errors import MOST_STARTS, env_error
from recipes.embodied.envs.faults.repeating import (
    MOST_REPEATED,
    FaultLog,
    RaisedTwiceError,
    RepeatingSimulator,
    SimulatorError,
)

# In the information of a step: the episode ends here, and is left out, unless there is an `EnvError` of it, as JSON.
_FAILED: Final = "rlinf/failed"
_ERROR: Final = "rlinf/error"


class RepeatingEnv(gymnasium.Wrapper, RepeatingSimulator):
    """An environment with the record that repeats its episode: how it began, and each action with its outcome.

    An episode that is left out, or in which the environment has an error, is truncated.

    Args:
        env: the environment.
        make: returns a new one.
        task: the task, for messages.
    """

    def __init__(self, env: gymnasium.Env, make: Callable[[], gymnasium.Env], task: str) -> None:
        gymnasium.Wrapper.__init__(self, env)
        RepeatingSimulator.__init__(self, FaultLog())
        self._make_again, self._task = make, task
        self._how: dict[str, Any] = {}
        self._first: Any = None
        self._steps = 0
        self._past: list[tuple[Any, tuple[Any, ...]]] = []
        # The episode was repeated, and did not come out as before; or its reset raised.
        self._lost = False
        self._error: EnvError | None = None

    def reset(self, **how: Any) -> Any:
        """See Gymnasium's `Env`; where that raises, an episode begins from the next seed, whose first step fails."""
        self._how, self._steps, self._lost, self._error = how, 0, False, None
        self._past.clear()
        seed, tries = how.get("seed"), 0
        while True:
            try:
                self._first = self._attempt(lambda: self.env.reset(**self._how), "its reset")
            except SimulatorError as error:
                self._error = self._error or env_error(f"{seed}", error, began=False)
                self._lost, tries = True, tries + 1
                if seed is None or tries > MOST_STARTS:
                    raise
                self._how = {**how, "seed": (seed + tries) % 2**31}
            else:
                return self._first

    def step(self, action: Any) -> Any:
        """See Gymnasium's `Env`."""
        if self._lost:
            return self._left_out
        try:
            observation, *outcome = self._attempt(lambda: self.env.step(action), "its action", action)
        except RaisedTwiceError as error:
            self._error = env_error(f"{self._how.get('seed')}", error)
            return self._left_out
        if self._lost:
            return self._left_out
        self._steps += 1
        if self._steps <= MOST_REPEATED:
            self._past.append((deepcopy(action), tuple(outcome)))
        return observation, *outcome

    @property
    def _left_out(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        error = {} if self._error is None else {_ERROR: json.dumps(self._error)}
        return self._first[0], 0.0, False, True, {_FAILED: True, **error}

    def _renew(self) -> None:
        with suppress(Exception):
            self.env.close()
        self.env = self._make_again()
        self._first = self.env.reset(**self._how)

    def _replay(self) -> None:
        # Of an episode that is too long not every step was kept.
        self._lost = self._steps > len(self._past) or not all(
            tuple(self.env.step(action)[1:]) == outcome for action, outcome in self._past
        )

    def _names(self) -> tuple[str, str]:
        return self._task, f"step {self._steps + 1} of an episode that began with seed {self._how.get('seed')}"


def errors_in(infos: Mapping[str, Any]) -> dict[int, EnvError]:
    """Return the errors of the environments of a vector, by row; they are among those that `left_out` returns."""
    texts = infos.get(_ERROR, ())
    return {row: EnvError(*json.loads(text)) for row, text in enumerate(texts) if text}


def left_out(infos: Mapping[str, Any], count: int) -> BoolArray | None:
    """Return in which environments of a vector the episode failed, bool [count]; None: in none."""
    rows = infos.get(_FAILED)
    return None if rows is None else np.asarray(rows, np.bool_).reshape(count)
