"""The common part of all human input devices: takeovers, gripper, control rate."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.config.intervention_types import PersonOptions
from recipes.embodied.interventions.intervention import (
    STILL,
    Axes,
    HandMotion,
    InterventionSource,
    Steerable,
    Takeover,
    Verdict,
)
from rlinf_core import ConfigError

_DEFAULT_HZ = 20.0
KEY_REWARD: Final = 1.0  # the addition of the reward button to a step's reward


class Controls(NamedTuple):
    """State of a device, and the keys pressed since the last read.

    Attributes:
        linear: forward, left, up, each from -1 to 1.
        angular: about these axes.
        engaged: whether a button that takes over even without a motion is held or was pressed.
        toggles_gripper: whether the gripper's button was pressed.
        verdict: the verdict of a pressed button; None: none was pressed.
        rewards: whether the button that rewards this step was pressed.
    """

    linear: Axes = STILL
    angular: Axes = STILL
    engaged: bool = False
    toggles_gripper: bool = False
    verdict: Verdict | None = None
    rewards: bool = False


class Engagement:
    """Decides in which steps a person acts: from a moved control until some steps without one.

    Args:
        options: dead band, speed, signs of axes, and steps after which the policy acts again.

    Attributes:
        gripper_closed: whether the gripper should be closed; while the policy acts, its last command.
    """

    def __init__(self, options: PersonOptions) -> None:
        self._options = options
        self._left = 0
        self._gripped = False
        self.gripper_closed = False

    def step(self, controls: Controls) -> HandMotion | None:
        """Return the motion of a step; None: the person does not act."""
        band, speed = self._options.deadband, self._options.speed
        axes = (*controls.linear, *controls.angular)
        moved = [0.0 if abs(axis) <= band else (abs(axis) - band) / (1 - band) * np.sign(axis) for axis in axes]
        self._gripped = (self._gripped and self.active) or controls.toggles_gripper
        if controls.toggles_gripper:
            self.gripper_closed = not self.gripper_closed
        if any(moved) or controls.engaged or controls.toggles_gripper:
            self._left = self._options.release_steps + 1
        if not self._left:
            return None
        self._left -= 1
        pairs = zip(moved, self._options.signs, strict=True)
        x, y, z, roll, pitch, yaw = (float(np.clip(axis, -1, 1)) * speed * sign for axis, sign in pairs)
        return HandMotion((x, y, z), (roll, pitch, yaw), self.gripper_closed, self._gripped)

    def begin(self) -> None:
        """Clear the gripper and the takeover of the previous episode."""
        self.gripper_closed, self._left = False, 0

    @property
    def active(self) -> bool:
        """Whether the person acts in the next step even without a motion."""
        return self._left > 0


class PersonSource(InterventionSource):
    """A device with which a person drives the one environment of a worker. Subclasses implement `poll`."""

    def __init__(self, env: Steerable, options: Any) -> None:
        super().__init__(env, options)
        if env.num_envs != 1:
            raise ConfigError(
                f"a person controls one environment, but this worker has {env.num_envs}",
                help="set `env.train.total_num_envs` to the number of env workers",
            )
        self._engagement = Engagement(self._engagement_options())
        self._hz = options.hz or env.control_hz or _DEFAULT_HZ
        self._due = 0.0
        self._episode: tuple[int, int] | None = None

    def _engagement_options(self) -> PersonOptions:
        return self.options

    @abstractmethod
    def poll(self) -> Controls:
        """Return the state of the device, without waiting.

        Raises:
            InterventionError: the device was lost.
        """

    def read(self) -> Takeover | None:
        if not self.env.paces_itself:
            self._pace()
        return self._step()

    def wait_for_person(self) -> None:
        while self._motion(self.poll()) is None:
            time.sleep(1 / self._hz)

    def _motion(self, controls: Controls) -> HandMotion | None:
        """Return the motion of a step; a takeover starts with the gripper's state after the policy or the reset."""
        progress = self.env.progress
        episode = (progress.reset, int(progress.episode[0]))
        if episode != self._episode:
            self._episode = episode
            self._engagement.begin()
        if not self._engagement.active:
            self._engagement.gripper_closed = self.env.gripper_is_closed(0)
        return self._engagement.step(controls)

    def _step(self) -> Takeover | None:
        controls = self.poll()
        motion = self._motion(controls)
        if motion is None and controls.verdict is None and not controls.rewards:
            return None
        action = np.zeros(self.env.action_size) if motion is None else self._action(motion)
        actions = np.asarray(action, np.float32)[None]
        verdicts: dict[int, Verdict] = {} if controls.verdict is None else {0: controls.verdict}
        rewards = {0: KEY_REWARD} if controls.rewards else {}
        return Takeover(np.array([motion is not None]), actions, verdicts, rewards)

    def _action(self, motion: HandMotion) -> NDArray[np.float32]:
        return self.env.steer(motion, 0)

    def _pace(self) -> None:
        now = time.monotonic()
        if now < self._due:
            time.sleep(self._due - now)
        self._due = max(self._due, now) + 1 / self._hz
