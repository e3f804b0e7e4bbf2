"""The methods of an environment that a subclass must or may implement."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.cameras.drivers import CameraView
from recipes.embodied.envs.checks import broken
from recipes.embodied.envs.env_spec import EnvSpec, FloatArray, IntArray, Observation, Transition
from recipes.embodied.envs.env_state import Starts, State
from recipes.embodied.envs.observation_keys import camera_of
from recipes.embodied.interventions.intervention import HandMotion, LeaderAction
from recipes.training.arrays import Array
from rlinf_core import ConfigError


class TaskMethods(ABC):
    """The methods of a task, for B copies of it that step together.

    Four are required; the defaults of the others mean that the environment lacks the feature. Episodes are no concern
    of these methods: `VectorEnv` begins, counts and ends them.

    Attributes:
        default_max_episode_steps: the limit if the settings have none; None: no limit. A subclass may set it for the
            class or in its constructor.
        alters_actions: whether `_advance` may execute other actions than requested, see `Transition.actions`.
        paces_itself: whether a step takes as long as an action does on a real arm.
        control_hz: actions per second of the simulated or real arm; None: unknown.
        mapping: how a simulator's observations and actions are converted, in words; None: they are not.
        start_faults: differences of the first stored start of each task from the task's own description; None: starts
            are drawn.
    """

    default_max_episode_steps: int | None = 50
    alters_actions: ClassVar[bool] = False
    paces_itself: bool = False
    control_hz: float | None = None
    mapping: str | None = None
    start_faults: list[str] | None = None

    @property
    @abstractmethod
    def spec(self) -> EnvSpec:
        """The sizes of observations and actions."""

    @abstractmethod
    def _start(self, rows: IntArray, starts: Starts) -> None:
        """Reset the environments of `rows`; all randomness must come from `starts`."""

    @abstractmethod
    def _advance(self, actions: Array, rows: IntArray | None) -> Transition:
        """Execute one action [B, A] in the environments of `rows` (None: all). The others must not change."""

    @abstractmethod
    def _observe(self) -> Observation:
        """Return the current observations in new arrays, or in arrays that are never modified."""

    def _save(self) -> State | None:
        """Return the state [B, ...] from which `_load` can continue every episode.

        Returns:
            None if the environment cannot: a resumed run then begins new episodes.
        """
        return None

    def _load(self, state: State) -> None:  # noqa: B027 - where `_save` returns none it is never called
        """Restore the episodes of a `state` that `_save` returned; its rows are those of this batch."""

    def _foresee(self, actions: Array) -> None:  # noqa: B027 - most gain nothing by it
        """Receive the actions [B, C, A] of the next `_advance` calls in advance, each until its episode ends."""

    def expert(self) -> FloatArray | None:
        """Return actions of a scripted expert in the current states, float32 [B, A].

        The actions depend only on the state, so that they also exist for states that a policy has reached.

        Returns:
            None if the task has no expert.
        """
        return None

    def steer(self, motion: HandMotion, row: int) -> FloatArray:
        """Return the action, float32 [A], that moves the hand of one environment as a person commands.

        An action without motion holds the arm, also from a person's release to the next chunk. By default the action of
        `HandMotion.action`: the motion, and the gripper's number of the last action. Override this if numbers are
        positions, or the gripper's number is a speed; `VectorEnv.executed_actions` has the last executed actions.

        Raises:
            ConfigError: actions are discrete.
        """
        if self.spec.num_choices is not None:
            raise ConfigError(
                "a person cannot steer an environment whose actions are choices",
                help="remove `env.train.intervention`, or implement `steer` in your environment",
            )
        return motion.action(self.action_size, self.executed_actions[row])

    @property
    @abstractmethod
    def executed_actions(self) -> FloatArray:
        """float32 [B, A], the last executed actions of the current episodes; see `VectorEnv`."""

    def gripper_is_closed(self, row: int) -> bool:
        """Return whether the last command closed the gripper of one environment; by default according to the last of
        more than three numbers of an action.
        """
        return self.action_size > 3 and bool(self.executed_actions[row, -1] > 0)

    def follow(self, joints: NDArray[np.float64], row: int) -> LeaderAction | None:
        """Return the action that brings the arm of one environment to the joints of a leader; None: no leader."""
        return None

    @property
    def action_size(self) -> int:
        """The size of an action, A."""
        return self.spec.action_size

    def _failures(self) -> NDArray[np.str_] | None:
        """Return the failure of each running episode, such as `dropped`, text [B]; empty: none.

        Called when an episode ends without success.
        """
        return None

    def look(self, rows: IntArray) -> State | None:
        """Return the data for videos of the current states of `rows`, arrays [n, ...] by name; by default camera
        images.

        Returns:
            None if there is nothing to show.
        """
        images = {name: array[rows] for name, array in self._observe().items() if camera_of(name) is not None}
        return images or None

    def picture(self, seen: State) -> NDArray[np.uint8]:
        """Return the data of `look` as images, uint8 [n, H, W, 3]; by default the cameras side by side.

        Raises:
            EnvContractError: an image of `look` is not uint8 [n, H, W, 3].
        """
        for name, image in seen.items():
            if image.dtype != np.uint8 or image.ndim != 4 or image.shape[3] != 3:
                said = f"{image.dtype} {list(image.shape)}"
                raise broken(
                    f"`{name}` of `look` is {said}; images are RGB, uint8 [n, H, W, 3]",
                    "convert it, or implement `picture`, which makes images from other data",
                )
        height = max(image.shape[1] for image in seen.values())
        padded = [np.pad(image, ((0, 0), (0, height - image.shape[1]), (0, 0), (0, 0))) for image in seen.values()]
        return np.concatenate(padded, axis=2)

    def views(self, row: int) -> list[CameraView]:
        """Return the newest image of each camera of one environment, for a person who steers it; by default those that
        `look` and `picture` make now.
        """
        seen = self.look(np.array([row]))
        if seen is None:
            return []
        now, cameras = time.monotonic(), {name: camera_of(name) for name in seen}
        if all(cameras.values()):
            return [CameraView(str(cameras[name]), images[0], now) for name, images in seen.items()]
        return [CameraView("scene", self.picture(seen)[0], now)]

    def frame_ages(self) -> dict[str, FloatArray]:
        """Return the ages of the current observation's frames when it was made, in seconds, float32 [B], by camera;
        empty for
        simulated cameras, whose frames have no age.
        """
        return {}

    def take_figures(self) -> dict[str, tuple[float, int]]:
        """Return measurements since the last call, other than those of episodes: sums and their counts, by name."""
        return {}

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Release the resources of the environments. Idempotent."""
