"""Conformance tests of `VectorEnv` for custom environments.

    check_env(MyEnv, task="stack")

Violations show up only later, elsewhere: as runs that cannot be resumed, groups that start differently, or
observations that change under the policy.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.checks import EnvContractError as EnvContractError
from recipes.embodied.envs.checks import broken, check_unchanged, with_copies
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, Observation
from recipes.training.arrays import Array, NonFiniteError

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
