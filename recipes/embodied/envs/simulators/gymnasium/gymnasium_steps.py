"""Resets and steps of Gymnasium environments, checked against the Gymnasium interface."""

# Gymnasium is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Final

import gymnasium
import numpy as np

from recipes.embodied.envs.processes.simulator import Columns, Outcome
from recipes.embodied.envs.simulators.gymnasium.gymnasium_spaces import OWN
from rlinf_core import ConfigError

_OLD_STEP: Final = 4
_STEP: Final = 5
_RESET: Final = 2
SUCCESS: Final = ("is_success", "success")
# The types that most environments return.
_TUPLE: Final = frozenset({tuple})
_NUMBERS: Final[frozenset[type]] = frozenset({float, np.float32, np.float64})
_BOOLEANS: Final[frozenset[type]] = frozenset({bool, np.bool_})
_DICTIONARY: Final[frozenset[type]] = frozenset({dict})


def check_seeded(task: str, env: gymnasium.Env[Any, Any]) -> None:
    """Refuse a `reset` that takes no seed.

    Raises:
        ConfigError: it takes none.
    """
    # Gymnasium's wrappers take a seed, and pass it on to whatever they wrap.
    while isinstance(env, gymnasium.Wrapper) and type(env).reset.__module__.startswith("gymnasium."):
        env = env.env
    try:
        signature(env.reset).bind(seed=0)
    except TypeError:
        raise ConfigError(
            f"`reset` of `{task}` takes no `seed`",
            where="env.task",
            help="write `def reset(self, *, seed=None, options=None)`, and call `super().reset(seed=seed)`",
        ) from None


def checked_reset(task: str, result: Any) -> Any:
    """Return the observation from a result of `reset`.

    Raises:
        ConfigError: the result is not a pair of observation and information.
    """
    if isinstance(result, tuple) and len(result) == _RESET and isinstance(result[1], (dict, Mapping)):
        return result[0]
    raise ConfigError(
        f"`reset` of `{task}` does not return an observation and a dictionary of information",
        where="env.task",
        help="environments of the old Gym return the observation alone: wrap it in `shimmy.GymV21CompatibilityV0`",
    )


def checked_step(task: str, result: Any) -> tuple[Any, Outcome]:
    """Return the observation and the outcome from a result of `step`.

    Raises:
        ConfigError: values are missing or have a wrong type.
    """
    if type(result) is tuple and len(result) == _STEP:
        observation, reward, terminated, truncated, info = result
        # A fast path for the usual types.
        is_plain = type(reward) is float and type(terminated) is bool and type(truncated) is bool
        if is_plain and type(info) is dict and not info:
            return observation, Outcome(reward, terminated, truncated)
    observation, reward, terminated, truncated, info = _five(task, result)
    success = _success(info)
    return observation, Outcome(
        _number(task, reward),
        _truth(task, "terminated", terminated),
        _truth(task, "truncated", truncated),
        None if success is None else _truth(task, "success", success),
    )


def checked_together(results: Sequence[Any]) -> tuple[list[Any], Columns] | None:
    """Return the observations of some steps and their outcomes, much faster than `checked_step` for each.

    Returns:
        None if a step requires `checked_step`, because it reports success or is invalid.
    """
    if not _all_of(_TUPLE, results):
        return None
    try:
        observations, rewards, terminations, truncations, infos = zip(*results, strict=True)
    except ValueError:  # not five values each
        return None
    if not (
        _all_of(_NUMBERS, rewards)
        and _all_of(_BOOLEANS, terminations)
        and _all_of(_BOOLEANS, truncations)
        and _all_of(_DICTIONARY, infos)
    ):
        return None
    if any(infos) and any(name in info for info in infos for name in SUCCESS):
        return None
    return [*observations], (rewards, terminations, truncations)


def _all_of(types: frozenset[type], values: Sequence[Any]) -> bool:
    """Return whether all values are exactly of some types, subclasses excluded."""
    return set(map(type, values)) <= types


def _success(info: Any) -> Any:
    """Return the reported success; None if nothing is reported."""
    if type(info) is dict and not info:
        return None
    return next((info[name] for name in SUCCESS if name in info), None) if isinstance(info, Mapping) else None


def _five(task: str, result: Any) -> tuple[Any, ...]:
    if not isinstance(result, tuple) or len(result) != _STEP:
        count = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        is_old = isinstance(result, tuple) and len(result) == _OLD_STEP
        raise ConfigError(
            f"`step` of `{task}` returns {count}, but Gymnasium's returns 5: observation, reward, terminated,"
            " truncated, info",
            where="env.task",
            help="4 values are the old Gym's: wrap it in `shimmy.GymV21CompatibilityV0`" if is_old else OWN,
        )
    return result


def _number(task: str, reward: Any) -> float:
    if type(reward) is float:  # a fast path for the usual type
        return reward
    array = np.asarray(reward)
    if array.size != 1 or array.dtype.kind not in "fiub":
        said = f"an array of the shape {list(array.shape)}" if array.size != 1 else reprlib.repr(reward)
        raise ConfigError(f"the reward of `{task}` is {said}", where="env.task", help="return one number")
    return float(array.reshape(()))


def _truth(task: str, name: str, value: Any) -> bool:
    if value is True or value is False or type(value) is np.bool_:  # a fast path for the usual types
        return bool(value)
    array = np.asarray(value)
    if array.size == 1 and array.dtype.kind in "fiub" and array.reshape(()) in (0, 1):
        return bool(array.reshape(()))
    raise ConfigError(f"`{name}` of `{task}` is {reprlib.repr(value)}", where="env.task", help="return true or false")
