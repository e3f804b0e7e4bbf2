"""Gymnasium vector environments, `gymnasium.make_vec`."""

# Gymnasium is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from recipes.embodied.envs.batched_env import BatchedEnv, BatchStep
from recipes.embodied.envs.env_spec import BoolArray, EnvSettings, EnvSpec, IntArray, Observation
from recipes.embodied.envs.simulators.gymnasium.gymnasium_env import cannot_be_made, registered
from recipes.embodied.envs.simulators.gymnasium.gymnasium_spaces import Reader, Writer, spec_of
from recipes.embodied.envs.simulators.gymnasium.gymnasium_steps import CheckedEnv, checked_batch_step, checked_reset
from recipes.embodied.envs.simulators.repeating_env import RepeatingEnv, errors_in, left_out
from recipes.training.arrays import Array
from rlinf_core import ConfigError, RLinfError


class GymnasiumVectorEnv(BatchedEnv):
    """`task` is an id; `options` are arguments of `gymnasium.make_vec`.

    `vectorization_mode` is `sync` by default; `async` steps every environment in a process of Gymnasium's own;
    `vector_entry_point` is the id's own implementation, which must be able to leave resets to its user
    (`AutoresetMode.DISABLED`). Observations and actions are as those of `env_type: gymnasium`.
    """

    def __init__(self, settings: EnvSettings) -> None:
        if settings.task is None:
            raise ConfigError(
                "`env_type: gymnasium_vector` needs a task", help="add `task: CartPole-v1`, or another id"
            )
        super().__init__(settings)
        options = {"vectorization_mode": "sync", **settings.options}
        kwargs: dict[str, Any] = options.pop("vector_kwargs", {})
        try:
            limit = registered(settings.task).max_episode_steps
            if options["vectorization_mode"] != "vector_entry_point":
                # The limit is kept by `VectorEnv`: -1 makes no `TimeLimit` of it.
                options = {"max_episode_steps": -1, "disable_env_checker": True, **options}
                kwargs = {"autoreset_mode": AutoresetMode.DISABLED, **kwargs}
                options["wrappers"] = _wrappers(settings, options)
            self._env = gymnasium.make_vec(settings.task, settings.num_envs, vector_kwargs=kwargs, **options)
        except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
            raise cannot_be_made(settings.task, error) from error
        self.default_max_episode_steps = limit
        mode = self._env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.DISABLED:
            self._env.close()
            raise ConfigError(
                f"`{settings.task}` resets its environments itself ({mode}): their last observations would be lost",
                where="env.task",
                help="write `options: {vectorization_mode: sync}`",
            )
        self._task = settings.task
        self._reads = Reader(settings.task, self._env.single_observation_space)
        self._writes = Writer(settings.task, self._env.single_action_space)

    @property
    def spec(self) -> EnvSpec:
        """From the spaces of the environment."""
        return spec_of(self._reads, self._writes)

    def _begin_rows(self, mask: BoolArray, seeds: IntArray) -> Observation:
        # Without a mask an environment that has never begun would be read.
        options = {} if mask.all() else {"options": {"reset_mask": mask}}
        return self._read(checked_reset(self._task, self._asked(self._env.reset, seed=seeds.tolist(), **options)))

    def _step_all(self, actions: Array) -> BatchStep:
        result = self._asked(self._env.step, np.asarray(self._writes(actions)))
        seen, rewards, terminations, truncations, successes = checked_batch_step(self._task, result, self.num_envs)
        failures = left_out(result[-1], self.num_envs)
        if failures is not None:
            self._raised |= errors_in(result[-1])
        return BatchStep(self._read(seen), rewards, terminations, truncations, successes, failures)

    @staticmethod
    def _asked(ask: Callable[..., Any], *values: Any, **options: Any) -> Any:
        """Return what Gymnasium answers; an error of an environment in a process of its own is raised as it was."""
        try:
            return ask(*values, **options)
        except RLinfError as error:
            # Gymnasium makes a new error, with the old one in the place of its message.
            inner: object = error.message
            if isinstance(inner, RLinfError):
                raise inner from None
            raise

    def _read(self, observation: Any) -> Observation:
        return self._reads.batch(self._env.observation_space, observation)

    def close(self) -> None:
        """Close the environments."""
        if hasattr(self, "_env"):
            self._env.close()


def _wrappers(settings: EnvSettings, options: Mapping[str, Any]) -> list[Callable[[gymnasium.Env], gymnasium.Env]]:
    """Return the wrappers of each environment: those of the file, the checks, and what repeats its episodes."""
    task = str(settings.task)
    wrappers = [*(options.get("wrappers") or ()), partial(CheckedEnv, task=task)]
    if not settings.repeats:
        return wrappers
    own = {name: value for name, value in options.items() if name not in ("vectorization_mode", "wrappers")}
    return [*wrappers, partial(RepeatingEnv, make=partial(_make_one, task, own, wrappers), task=task)]


def _make_one(
    task: str, options: Mapping[str, Any], wrappers: Iterable[Callable[[gymnasium.Env], gymnasium.Env]]
) -> gymnasium.Env:
    """Return an environment as `gymnasium.make_vec` makes each of a vector."""
    env = gymnasium.make(task, **options)
    for wrapper in wrappers:
        env = wrapper(env)
    return env
