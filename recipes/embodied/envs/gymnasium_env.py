"""Any environment of Gymnasium by its id, one after another in this process.

For environments as cheap as the classic ones this is faster than Gymnasium's own `AsyncVectorEnv`; for dear ones, give
the component `env` more processes.
"""

# Gymnasium is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.keys import INSTRUCTIONS, MAIN_CAMERA, STATES, image_key
from recipes.embodied.envs.starts import Starts
from recipes.embodied.envs.state import State
from recipes.embodied.envs.types import (
    EnvSettings,
    EnvSpec,
    FloatArray,
    ImageShape,
    IntArray,
    Observation,
    Transition,
)
from rlinf_core import ConfigError


class GymnasiumEnv(VectorEnv):
    """`task` is the id, `options` are arguments of `gymnasium.make`.

    Observations that are images (uint8, three dimensions) become `images.CAMERA`: of a dictionary the camera has the
    name of its part, a bare image that of the main camera. A text becomes `instructions`; everything else becomes
    `states`, with the parts of a dictionary one after the other, and a choice as a vector of zeros with a one.
    Continuous actions are stretched from -1..1 to the bounds of the environment where those are finite.
    `max_episode_steps` is by default the limit that the id brings. Success is what an environment reports as
    `is_success` or `success`.

    Gymnasium has no call for the state of an environment. A resumed run therefore repeats the actions of each running
    episode from its seed; `load` tells by the observations whether that led to the same state.
    """

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        if settings.task is None:
            raise ConfigError("`env_type: gymnasium` needs a task", help="add `task: CartPole-v1`, or another id")
        self._envs: list[gymnasium.Env[Any, Any]] = []
        try:
            self.default_max_episode_steps = gymnasium.spec(settings.task).max_episode_steps
            # The limit is kept by `VectorEnv`: -1 makes no `TimeLimit` of it.
            options = {"max_episode_steps": -1, "disable_env_checker": True, **settings.options}
            for _ in range(settings.num_envs):
                self._envs.append(gymnasium.make(settings.task, **options))
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            self.close()
            raise ConfigError(f"`{settings.task}` cannot be made: {error}", where="env.task") from error
        self._reads = _Reader(settings.task, self._envs[0].observation_space)
        self._writes = _Writer(settings.task, self._envs[0].action_space)
        self._current: list[Any] = [None] * settings.num_envs
        self._rewards = np.zeros(settings.num_envs, np.float32)
        self._knows_success = False
        # Of each running episode: the seed it began with, and the actions since.
        self._seeds = np.zeros(settings.num_envs, np.int64)
        self._actions: list[list[Any]] = [[] for _ in range(settings.num_envs)]

    @property
    def spec(self) -> EnvSpec:
        """From the spaces of the environment."""
        return EnvSpec(
            state_size=self._reads.state_size,
            action_size=self._writes.size,
            num_choices=self._writes.num_choices,
            cameras=self._reads.cameras,
            has_instructions=self._reads.instruction is not None,
        )

    @property
    def knows_success(self) -> bool:
        """Whether the environment has ever reported success or failure."""
        return self._knows_success

    def close(self) -> None:
        """Close every environment."""
        while self._envs:
            self._envs.pop().close()

    def _start(self, rows: IntArray, starts: Starts) -> None:
        for row, seed in zip(rows.tolist(), starts.seeds(), strict=True):
            self._current[row], _ = self._envs[row].reset(seed=seed)
            self._seeds[row] = seed
            self._actions[row].clear()

    def _advance(self, actions: NDArray[Any], rows: IntArray | None) -> Transition:
        written = self._writes(actions)
        ended = np.zeros((3, self.num_envs), np.bool_)
        rewards = np.zeros(self.num_envs, np.float32)
        keeps = self.settings.resumable
        for row in range(self.num_envs) if rows is None else rows.tolist():
            if keeps:
                self._actions[row].append(written[row])
            current, reward, terminated, truncated, info = self._envs[row].step(written[row])
            self._current[row] = current
            rewards[row] = reward
            success = info.get("is_success", info.get("success")) if info else None
            if success is not None:
                self._knows_success = True
                ended[2, row] = success
            ended[0, row], ended[1, row] = terminated, truncated
        return Transition(rewards, ended[0], ended[1], ended[2])

    def _save(self) -> State:
        counts = [len(actions) for actions in self._actions]
        actions = self._writes.table(self.num_envs, max(counts))
        for row, taken in enumerate(self._actions):
            if taken:
                actions[row, : len(taken)] = taken
        return {"seeds": self._seeds.copy(), "counts": np.array(counts), "actions": actions}

    def _load(self, state: State) -> None:
        for row, env in enumerate(self._envs):
            self._seeds[row] = seed = int(state["seeds"][row])
            self._current[row], _ = env.reset(seed=seed)
            taken = self._writes.listed(state["actions"][row, : state["counts"][row]])
            for action in taken:
                self._current[row], *_ = env.step(action)
            self._actions[row] = taken

    def _observe(self) -> Observation:
        return self._reads(self._current)


class _Reader:
    """Observations of one environment each, as one batch."""

    def __init__(self, task: str, space: spaces.Space[Any]) -> None:
        parts = list(space.spaces.items()) if isinstance(space, spaces.Dict) else [("", space)]
        self._nested = isinstance(space, spaces.Dict)
        # By camera, the part of a dictionary that holds its images.
        self._images = {name or MAIN_CAMERA: name for name, part in parts if _is_image(part)}
        self.cameras: dict[str, ImageShape] = {
            name or MAIN_CAMERA: (part.shape[0], part.shape[1], part.shape[2])
            for name, part in parts
            if isinstance(part, spaces.Box) and _is_image(part)
        }
        self.instruction = next((name for name, part in parts if name and isinstance(part, spaces.Text)), None)
        self._states = [
            (name, part) for name, part in parts if name not in self._images.values() and name != self.instruction
        ]
        for name, part in self._states:
            if not isinstance(part, spaces.Box | spaces.Discrete | spaces.MultiBinary):
                raise ConfigError(
                    f"observations of `{task}` are not understood: {f'`{name}` is ' if name else ''}{part}",
                    help="wrap it in an environment of your own, `env_type: package.module:Class`",
                )
        self.state_size = sum(_length(part) for _, part in self._states)

    def __call__(self, current: list[Any]) -> Observation:
        found: Observation = {}
        for camera, name in self._images.items():
            found[image_key(camera)] = np.stack([each[name] for each in current] if self._nested else current)
        if self.instruction is not None:
            found[INSTRUCTIONS] = np.array([each[self.instruction] for each in current])
        if not self._nested and self._states and isinstance(self._states[0][1], spaces.Box):
            found[STATES] = np.array(current, np.float32).reshape(len(current), -1)
        elif self._states:
            found[STATES] = np.stack([self._flat(each) for each in current])
        return found

    def _flat(self, observation: Any) -> FloatArray:
        parts = [_vector(space, observation[name] if self._nested else observation) for name, space in self._states]
        return np.concatenate(parts)


class _Writer:
    """Actions of a batch, as one environment each wants them."""

    def __init__(self, task: str, space: spaces.Space[Any]) -> None:
        self.num_choices: int | None = None
        if isinstance(space, spaces.Discrete):
            self.size, self.num_choices = 1, int(space.n)
            self._first = int(space.start)
        elif isinstance(space, spaces.Box):
            self.size = _length(space)
            self._shape = space.shape
            finite = np.isfinite(space.low) & np.isfinite(space.high)
            low, high = np.where(finite, space.low, -1), np.where(finite, space.high, 1)
            self._middle, self._half = ((high + low) / 2).reshape(-1), ((high - low) / 2).reshape(-1)
            self._finite, self._type = finite.reshape(-1), space.dtype
        else:
            raise ConfigError(
                f"actions of `{task}` are not understood: {space}",
                help="wrap it in an environment of your own, `env_type: package.module:Class`",
            )

    def __call__(self, actions: NDArray[Any]) -> Any:
        if self.num_choices is not None:
            return (actions[:, 0] + self._first).tolist()
        bounded = np.where(self._finite, np.clip(actions, -1, 1), actions)
        return (self._middle + self._half * bounded).astype(self._type).reshape(-1, *self._shape)

    def table(self, rows: int, steps: int) -> NDArray[Any]:
        """Return room for actions as environments take them, [rows, steps, ...]."""
        if self.num_choices is not None:
            return np.zeros((rows, steps), np.int64)
        return np.zeros((rows, steps, *self._shape), self._type)

    def listed(self, actions: NDArray[Any]) -> list[Any]:
        """Return the actions of one episode, one after the other, as `step` takes them."""
        return actions.tolist() if self.num_choices is not None else list(actions)


def _is_image(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


def _length(space: spaces.Space[Any]) -> int:
    return int(space.n) if isinstance(space, spaces.Discrete) else int(np.prod(space.shape or (1,)))


def _vector(space: spaces.Space[Any], value: Any) -> FloatArray:
    if isinstance(space, spaces.Discrete):
        return np.eye(int(space.n), dtype=np.float32)[int(value) - int(space.start)]
    return np.asarray(value, np.float32).reshape(-1)
