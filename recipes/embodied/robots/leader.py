"""A leader arm: a second SO-101, without torque, whose joints a person moves by hand and the robot's arm follows."""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.interventions.intervention import HandMotion, InterventionError, LeaderAction, Steerable
from recipes.embodied.interventions.person import Controls, PersonSource
from recipes.embodied.interventions.source_options import LeaderOptions, PersonOptions
from recipes.embodied.robots.robot_errors import RobotError
from recipes.embodied.robots.so101_bus import JOINTS, SO101Bus
from rlinf_core import ConfigError

_WARNING_STEPS: Final = 40  # between two lines about arms that are too far apart
_log = logging.getLogger("rlinf.robots")


class LeaderSource(PersonSource):
    """Takes over when the leader is moved near the arm's own pose; the arm then follows its joints at its own speed,
    each from the moment on in which the person has moved it: a gripper that holds something goes on holding it.
    """

    options_model = LeaderOptions
    judges = False

    def __init__(self, env: Steerable, options: LeaderOptions) -> None:
        super().__init__(env, options)
        self._where = f"leader arm at {options.device}"
        if env.follow(np.zeros(len(JOINTS)), 0) is None:
            raise ConfigError(
                "`source: leader` moves an SO-101, which this robot is not",
                help="use another source, or give your driver a method `follow`",
            )
        try:
            self._bus = SO101Bus(options.device, options.calibration, self._where)
            self._bus.hold(False)
            self._joints = self._seen = self._begun = self._bus.read()
        except RobotError as error:
            raise self._lost(error) from error
        self._unwarned_steps = 0
        self._moved = np.zeros(len(JOINTS), np.bool_)  # joints that the person has moved in this takeover

    def poll(self) -> Controls:
        """See `PersonSource`: engaged while the leader moves, and while the arm is on its way to where it stands."""
        try:
            self._joints = self._bus.read()
        except RobotError as error:
            raise self._lost(error) from error
        if not self._engagement.active:
            self._begun, self._moved = self._seen, np.zeros(len(JOINTS), np.bool_)
        self._moved |= np.abs(self._joints - self._begun) > self.options.deadband
        moved = bool((np.abs(self._joints - self._seen) > self.options.deadband).any())
        if moved:
            self._seen = self._joints
        if self._engagement.active:
            behind = any(abs(way) > self.options.deadband for way in self._follow().away.values())
            return Controls(engaged=moved or behind)
        far = {joint: way for joint, way in self._away().items() if abs(way) > self.options.align}
        if moved and far:
            self._warn(far)
        return Controls(engaged=moved and not far)

    def close(self) -> None:
        """See `InterventionSource`."""
        try:
            self._bus.close()
        except RobotError as error:
            _log.warning("%s", error)

    def _engagement_options(self) -> PersonOptions:
        return PersonOptions(release_steps=self.options.release_steps)

    def _action(self, motion: HandMotion) -> NDArray[np.float32]:
        return self._follow().action

    def _follow(self) -> LeaderAction:
        away = self._away()
        held = self._joints - np.array([away.get(joint, 0.0) for joint in JOINTS])
        following = self.env.follow(np.where(self._moved, self._joints, held), 0)
        assert following is not None  # the source was opened with it
        return following

    def _away(self) -> dict[str, float]:
        """Return the way of each joint from the arm's target to the leader."""
        following = self.env.follow(self._joints, 0)
        return {} if following is None else following.away

    def _warn(self, far: dict[str, float]) -> None:
        if self._unwarned_steps == 0:
            ways = ", ".join(f"{joint} by {-way:+.0f}" for joint, way in far.items())
            _log.warning("%s is too far from the arm's pose to take over; turn it: %s", self._where, ways)
        self._unwarned_steps = (self._unwarned_steps + 1) % _WARNING_STEPS

    def _lost(self, error: RobotError) -> InterventionError:
        return InterventionError(error.message, where=self._where, why=error.why, help=error.help)
