"""A simulated arm: joints move as commanded, at realistic speeds, and stop in place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.robots.franka_arm import CONTROL_SECONDS
from recipes.embodied.robots.franka_kinematics import HOME, JOINT_MAX, JOINT_MIN, VELOCITY_MAX, hand_pose
from recipes.embodied.robots.wire_protocol import Box

# Shares of a motion that are tried where the whole would take the hand out of its workspace.
_SHARES = (1.0, 0.75, 0.5, 0.25)
_CLIPPED = 1e-9  # radians
RESET_SPEED = 0.25  # share of the published joint velocities at which the arm goes to its start


class SimulatedArm:
    """Seven joints and a gripper. Times are seconds on any clock that only goes forward.

    Args:
        speed: how many times faster than a real arm it moves.

    Attributes:
        workspace: the box that the hand must stay in; None: everywhere above the table.
        clipped: a limit made the last motion shorter than asked.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed
        self.workspace: Box | None = None
        self.clipped = False
        self._from = self._to = HOME.copy()
        self._begin = self._end = 0.0
        self.gripper_closed = False
        self.stopped: str | None = "it has just been switched on"

    def joints(self, now: float) -> NDArray[np.float64]:
        """Return [7], in radians."""
        if now >= self._end:
            return self._to.copy()
        share = (now - self._begin) / (self._end - self._begin)
        return self._from + max(share, 0.0) * (self._to - self._from)

    def moves(self, now: float) -> bool:
        """Return whether a motion is under way."""
        return now < self._end

    @property
    def still_since(self) -> float:
        """End of the last or the current motion."""
        return self._end

    def inside(self, joints: NDArray[np.float64]) -> bool:
        """Return whether the hand at `joints` [7] is above the table and in the workspace."""
        hand = hand_pose(joints[:, None])[0][:, 0]
        box = self.workspace
        within = box is None or bool((hand >= box.low).all() and (hand <= box.high).all())
        return within and bool(hand[2] > 0)

    def reset(self, joints: NDArray[np.float64], now: float) -> float:
        """Start a motion to `joints` [7], within their limits, and clear a stop.

        Returns:
            When it will be there.
        """
        self.stopped = None
        self.gripper_closed = self.clipped = False
        goal = np.clip(joints, JOINT_MIN, JOINT_MAX)
        slowest = float((np.abs(goal - self.joints(now)) / (RESET_SPEED * VELOCITY_MAX)).max())
        return self._go(goal, slowest, now)

    def move(self, deltas: NDArray[np.float64], close_gripper: bool | None, now: float) -> float:
        """Start a motion by `deltas` [7] in one control period, as far as limits and the table allow.

        Returns:
            When it will be there.

        Raises:
            ValueError: a joint would have to be faster than it can be.
        """
        # Differences of numbers that were rounded on the way may be larger by a hair.
        if (np.abs(deltas) > VELOCITY_MAX * CONTROL_SECONDS * (1 + 1e-6)).any():
            raise ValueError("a joint cannot move so far in one control period")
        here = self.joints(now)
        goal = self._allowed(here, deltas)
        if close_gripper is not None:
            self.gripper_closed = close_gripper
        self.clipped = bool(np.abs(goal - here - deltas).max() > _CLIPPED)
        return self._go(goal, CONTROL_SECONDS, now)

    def _allowed(self, here: NDArray[np.float64], deltas: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return where a motion ends: within the joints' limits, and as far as the hand stays where it may be."""
        for share in _SHARES:
            goal = np.clip(here + share * deltas, JOINT_MIN, JOINT_MAX)
            if self.inside(goal):
                return goal
        return here

    def stop(self, reason: str, now: float) -> None:
        """Stand still at once, until a reset. The first reason is kept."""
        if self.moves(now):
            self._from = self._to = self.joints(now)
            self._begin = self._end = now
        self.stopped = self.stopped or reason

    def _go(self, goal: NDArray[np.float64], seconds: float, now: float) -> float:
        self._from, self._to = self.joints(now), goal
        self._begin, self._end = now, now + seconds / self._speed
        return self._end
