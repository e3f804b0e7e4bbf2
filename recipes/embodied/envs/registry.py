"""Environments by `env_type`, imported on demand; and conformance tests of `VectorEnv` for custom ones.

    check_env(MyEnv, task="stack")

Violations of the contract show up only later, elsewhere: as runs that cannot be resumed, groups that start differently,
or observations that change under the policy.
"""

# Calls private methods of the environment, and makes one environment rest.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import numpy as np

from recipes.embodied.config.env_types import ENV_TYPES, GYMNASIUM, ID_FORM, how_to_install
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.checks import EnvContractError as EnvContractError
from recipes.embodied.envs.checks import broken, check_unchanged, with_copies
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, Observation
from recipes.training.arrays import Array, NonFiniteError
from rlinf_core import ConfigError
from rlinf_core.process.requirements import absence, install_command, missing_modules
from rlinf_core.registry import Registry
from rlinf_core.suggest import short_repr

_ENVS: Registry[type[VectorEnv]] = Registry(
    "env_type",
    {name: known.target for name, known in ENV_TYPES.items()},
    bases=("recipes.embodied.envs.base:VectorEnv", "gymnasium:Env"),
)
register_env = _ENVS.register


class MissingPackageError(ConfigError):
    """An environment type needs a package that this interpreter lacks or has in another version.

    Attributes:
        package: the missing module.
    """

    def __init__(self, env_type: str, package: str) -> None:
        super().__init__(
            f"`env_type: {env_type}` needs the package `{package}`, {absence(package)}: `{sys.executable}`",
            help=how_to_install(env_type) or f"run `{install_command(package)}`",
        )
        self.package = package


def make_env(env_type: str, settings: EnvSettings) -> VectorEnv:
    """Return a batch of environments.

    Args:
        env_type: a built-in or registered type, an id of Gymnasium, or a custom `package.module:Class`: a `VectorEnv`
            or a `gymnasium.Env`.
        settings: the settings of the batch.

    Raises:
        MissingPackageError: the type's package is not installed.
        ConfigError: there is no such type, it is not an environment, or it lacks the task.
    """
    if not isinstance(env_type, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        help = "write a class as text, as in `my_package:MyEnv`"
        raise ConfigError(f"`env_type` is {short_repr(env_type)}, expected text", help=help)
    if re.fullmatch(ID_FORM, env_type) and settings.task in (None, env_type):
        env_type, settings = GYMNASIUM, replace(settings, task=env_type)
    return env_class(env_type)(settings)


def env_class(env_type: str) -> type[VectorEnv]:
    """Return the class of an environment type.

    Raises: as `make_env`.
    """
    check_package(env_type)
    target = cast("object", _ENVS.get(env_type))
    gymnasium = sys.modules.get("gymnasium")  # loaded if any gymnasium class is
    if gymnasium is not None and isinstance(target, type) and issubclass(target, gymnasium.Env):
        from recipes.embodied.envs.simulators.gymnasium_env import env_of_class

        return env_of_class(env_type)
    return cast("type[VectorEnv]", target)


def check_package(env_type: str) -> None:
    """Check that an environment's package is installed, without importing it.

    Raises:
        MissingPackageError: the package is not installed.
    """
    known = ENV_TYPES.get(env_type)
    if known is not None and known.module is not None and missing_modules([known.module]):
        raise MissingPackageError(env_type, known.module)


MakeEnv = Callable[[EnvSettings], VectorEnv]
_STEPS = 6
# The number of environments in the job that the batches are parts of.
_TOTAL = 4
# The name of rewards beside the observations in a history.
_REWARDS = "rewards"


def check_env(make: MakeEnv, *, task: str | None = None, options: Mapping[str, Any] | None = None) -> None:
    """Run all conformance tests with a few environments and random actions.

    Args:
        make: the class, or any function from settings to an environment.
        task: the task of `env.train`.
        options: the options of `env.train`.

    Raises:
        EnvContractError: the contract is violated; the message says how, and where to look.
    """

    def made(num_envs: int, **settings: Any) -> VectorEnv:
        env = make(EnvSettings(num_envs=num_envs, task=task, options=options or {}, total_envs=_TOTAL, **settings))
        if not isinstance(env, VectorEnv):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            help = 'an environment of Gymnasium is checked by `lambda settings: make_env("my_package:MyEnv", settings)`'
            raise broken(f"`{type(env).__name__}` is no `VectorEnv`", help)
        return env

    def history(num_envs: int = 4, first_env: int = 0, **settings: Any) -> list[Observation]:
        """Return the observations and rewards of environments 0 to 3, or some of them, under the same actions."""
        with closing(made(num_envs, first_env=first_env, **settings)) as env:
            try:
                return _run(env, first_env)
            except NonFiniteError as error:
                raise broken(error.message, error.help or "") from error

    whole = history(seed=1)
    if not _same(whole, history(seed=1)):
        raise broken("one seed gives two different histories", "draw every random number from `starts`, in `_start`")
    parts = [history(2, first, seed=1) for first in (0, 2)]
    if not _same(whole, [_joined(*pair) for pair in zip(*parts, strict=True)]):
        raise broken(
            "an environment depends on others in the batch",
            "rows must not mix: no means over the batch, no shared numbers",
        )
    history(seed=1, group_size=2)  # members of a group start equally, or its reset raises
    with closing(made(2, max_episode_steps=1000, auto_reset=False)) as env:
        _check_rest(env)
    with closing(made(2, seed=1, resumable=True)) as env, closing(made(2, seed=1, resumable=True)) as again:
        _check_state(env, again)


def random_actions(spec: EnvSpec, num_envs: int, chunk: int = 1, seed: int = 0) -> Array:
    """Return actions [B, C, A] for the environment: numbers around 0, some beyond -1 and 1; or discrete actions."""
    random = np.random.default_rng(seed)
    if spec.num_choices is not None:
        return random.integers(0, spec.num_choices, size=(num_envs, chunk, 1))
    return random.normal(size=(num_envs, chunk, spec.action_size)).astype(np.float32)


def _run(env: VectorEnv, first_env: int) -> list[Observation]:
    """Return a short history; actions depend on the environment's number, not on its row in the batch."""
    rows = slice(first_env, first_env + env.num_envs)
    history = [env.reset(0)]
    for step in range(_STEPS):
        seen = with_copies(history[-1])
        result = env.step(random_actions(env.spec, 4, seed=step)[rows])
        check_unchanged(seen)
        history.append({**result.observations, _REWARDS: result.rewards})
    return history


def _check_rest(env: VectorEnv) -> None:
    """Check that an environment whose episode has ended does not change while others move."""
    env.reset(0)
    env._episodes.resting[0] = True
    before = env._observe()
    after = [env.step(random_actions(env.spec, 2, seed=step)).observations for step in range(_STEPS)][-1]
    if not all(np.array_equal(array[0], after[name][0]) for name, array in before.items()):
        raise broken("an environment moved while it was inactive", "in `_advance`, leave alone what is not in `rows`")


def _check_state(env: VectorEnv, again: VectorEnv) -> None:
    """Check that an environment with saved state continues its episode identically in another instance."""
    env.reset(0)
    for step in range(_STEPS):
        env.step(random_actions(env.spec, 2, seed=step))
    state = env.save()
    if state is None:
        return
    if not again.load(state):
        raise broken("`_load` does not lead back to the observations of `_save`", "save all that observations show")
    for step in range(_STEPS, 2 * _STEPS):
        actions = random_actions(env.spec, 2, seed=step)
        one, other = env.step(actions), again.step(actions)
        if not _same([one.observations], [other.observations]) or not np.array_equal(one.rewards, other.rewards):
            raise broken("an episode continues differently after saving and loading", "save all that a step depends on")


def _same(one: list[Observation], other: list[Observation]) -> bool:
    return all(
        a.keys() == b.keys()
        and all(np.array_equal(a[name], b[name], equal_nan=a[name].dtype.kind == "f") for name in a)
        for a, b in zip(one, other, strict=True)
    )


def _joined(one: Observation, other: Observation) -> Observation:
    return {name: np.concatenate((one[name], other[name])) for name in one}
