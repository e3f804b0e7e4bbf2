"""EnvPool: tasks of Meta-World, MuJoCo Playground, Gymnasium and others, stepped together by C++ threads."""

# EnvPool is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any, Final

import numpy as np
from gymnasium.vector.utils import batch_space

from recipes.embodied.envs.batched_env import BatchedEnv
from recipes.embodied.envs.env_spec import BoolArray, EnvSettings, EnvSpec, IntArray, Observation, Transition
from recipes.embodied.envs.env_state import Starts
from recipes.embodied.envs.simulators.gymnasium_env import SUCCESS
from recipes.embodied.envs.simulators.gymnasium_spaces import Reader, Writer, spec_of
from recipes.embodied.envs.simulators.packages import imported, unknown_task
from recipes.training.arrays import Array
from rlinf_core import ConfigError

# Meta-World never ends an episode by itself, so that its episodes can continue after success.
_NEVER_ENDS: Final = "MetaWorld/"
# `VectorEnv` enforces the limit of steps.
_NO_LIMIT: Final = 2**31 - 1
# Options that this adapter sets.
_OWN: Final = ("num_envs", "batch_size", "seed", "env_seed", "env_type", "max_episode_steps", "gym_reset_return_info")


class EnvpoolEnv(BatchedEnv):
    """`task` is an id of EnvPool (`MetaWorld/Reach-v3`, `Ant-v5`, ...), `options` are arguments of `envpool.make`.

    EnvPool seeds an environment only at its creation. A reset of all environments therefore creates them anew, each
    with the seed of its start; later episodes follow from that seed. Members of a group share a seed.

    EnvPool would reset an environment in the step after its last one. Here it is reset before, so that no step is lost
    and the last observation of an episode is returned.

    A task reports success as `success` or `is_success`, which ends the episode.
    """

    def __init__(self, settings: EnvSettings) -> None:
        if settings.task is None:
            raise ConfigError("`env_type: envpool` needs a task", help="add `task: MetaWorld/Reach-v3`, or another id")
        self.ends = not settings.task.startswith(_NEVER_ENDS)
        super().__init__(settings)
        self._envpool = imported("envpool", "envpool")
        self._task, self._options = settings.task, {"num_threads": 1, **settings.options}
        known = self._envpool.list_all_envs()
        if self._task not in known:
            raise unknown_task("envpool", self._task, known)
        own = next((name for name in _OWN if name in self._options), None)
        if own is not None:
            raise ConfigError(
                f"the option `{own}` of EnvPool is set by `env_type: envpool` itself",
                where="env.options",
                help="write `total_num_envs`, `seed` or `max_episode_steps` of the same section",
            )
        try:
            spec = self._envpool.make_spec(self._task, **self._options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"`{self._task}` cannot be made: {error}", where="env.options") from error
        self.default_max_episode_steps = spec.config.max_episode_steps
        self._reads = Reader(self._task, spec.observation_space)
        self._writes = Writer(self._task, spec.action_space)
        self._single = spec.observation_space
        self._space = batch_space(self._single, settings.num_envs)
        self._pool: Any = None

    @property
    def spec(self) -> EnvSpec:
        """The spec, derived from the task's spaces."""
        return spec_of(self._reads, self._writes)

    def _start(self, rows: IntArray, starts: Starts) -> None:
        if len(rows) == self.num_envs and not self._episodes.episode.any():
            self.close()
        super()._start(rows, starts)

    def _begin_rows(self, mask: BoolArray, seeds: IntArray) -> Observation:
        if self._pool is None:
            self._pool = self._envpool.make(
                self._task,
                env_type="gymnasium",
                num_envs=self.num_envs,
                env_seed=seeds.tolist(),
                max_episode_steps=_NO_LIMIT,
                **self._options,
            )
            return self._reads.batch(self._space, self._pool.reset()[0])
        rows = np.flatnonzero(mask).astype(np.int32)
        begun = self._reads.batch(batch_space(self._single, len(rows)), self._pool.reset(rows)[0])
        seen = {name: array.copy() for name, array in self._seen.items()}
        for name, array in begun.items():
            seen[name][rows] = array
        return seen

    def _step_all(self, actions: Array) -> tuple[Observation, Transition]:
        seen, rewards, terminated, truncated, info = self._pool.step(np.asarray(self._writes(actions)))
        said = next((info[name] for name in SUCCESS if name in info), None)
        successes = None if said is None else np.asarray(said, np.bool_)
        ended = np.asarray(terminated, np.bool_) if successes is None else np.asarray(terminated, np.bool_) | successes
        moved = Transition(np.asarray(rewards, np.float32), ended, np.asarray(truncated, np.bool_), successes)
        return self._reads.batch(self._space, seen), moved

    def close(self) -> None:
        """Close the environments."""
        pool, self._pool = getattr(self, "_pool", None), None
        if pool is not None:
            pool.close()
