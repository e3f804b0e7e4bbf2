"""The arm behind a controller: one interface for simulated and real arms, and the simulated one. Opens no sockets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.robots.franka_arm import CONTROL_SECONDS, HOME, JOINT_MAX, JOINT_MIN, VELOCITY_MAX, hand_pose
from recipes.embodied.robots.wire_protocol import Box

# Shares of a motion that are tried if the whole would take the hand out of its workspace.
_SHARES = (1.0, 0.75, 0.5, 0.25)
_CLIPPED = 1e-9  # radians
RESET_SPEED = 0.25  # share of the published joint velocities for the motion to a start


def period_end(last: float, now: float, period: float = CONTROL_SECONDS) -> float:
    """Return the end of the control period that an action at `now` belongs to.

    An action soon after the period that ended at `last` belongs to the next period, so that periods keep their length,
    however long a policy computes.
    """
    return (last if 0 <= now - last < period / 2 else now) + period


class Arm(ABC):
    """Seven joints and a gripper that follow a target. Times are monotonic seconds. Used by one thread.

    A move sets the target; the arm follows as its dynamics allow, and may lag behind. No method blocks.

    Attributes:
        name: the name of the controller of such an arm.
        firmware: versions of the hardware behind this class; None: no hardware.
        low: [7], the lowest target of each joint, in radians.
        high: [7], the highest target of each joint, in radians.
        workspace: the box that the hand must stay in; None: all space above the table.
        clipped: whether a limit shortened the last motion.
        gripper_closed: whether the gripper was commanded to close.
        stopped: why the arm stands still until a reset; None: it is not stopped.
    """

    name: str
    firmware: str | None = None
    low: NDArray[np.float64] = JOINT_MIN
    high: NDArray[np.float64] = JOINT_MAX

    def __init__(self) -> None:
        self.workspace: Box | None = None
        self.clipped = False
        self.gripper_closed = False
        self.stopped: str | None = "it has just been switched on"

    @abstractmethod
    def joints(self, now: float) -> NDArray[np.float64]:
        """Return the measured joints [7], in radians."""

    @abstractmethod
    def target(self, now: float) -> NDArray[np.float64]:
        """Return the joints [7] that the arm moves to or holds, in radians."""

    @abstractmethod
    def moves(self, now: float) -> bool:
        """Return whether the arm moves, or is about to."""

    @property
    @abstractmethod
    def still_since(self) -> float:
        """The time since which the arm stands still, if it does not move."""

    @property
    def mode(self) -> str:
        """State of the arm, in its firmware's word."""
        return "idle" if self.stopped else "move"

    @property
    def success_rate(self) -> float:
        """Share of the newest commands that reached the arm in time, from 0 to 1."""
        return 1.0

    @abstractmethod
    def reset(self, joints: NDArray[np.float64], now: float) -> float:
        """Start a slow motion to `joints` [7], within `low` and `high`, open the gripper, and clear a stop.

        Returns:
            The earliest time of arrival; `moves` is false after the arrival.
        """

    def move(self, deltas: NDArray[np.float64], close_gripper: bool | None, now: float) -> float:
        """Move the target by `deltas` [7], as far as limits and the table allow.

        Returns:
            The end of the control period.

        Raises:
            ValueError: a joint would have to exceed its velocity, or the arm refuses the target.
        """
        # Differences of rounded numbers may exceed the limit slightly.
        if (np.abs(deltas) > VELOCITY_MAX * CONTROL_SECONDS * (1 + 1e-6)).any():
            raise ValueError("a joint cannot move that far in one control period")
        here = self.target(now)
        goal = self._allowed(here, deltas, now)
        end = self._follow(goal, now)
        if close_gripper is not None:
            self._grip(close_gripper)
        self.clipped = bool(np.abs(goal - here - deltas).max() > _CLIPPED)
        return end

    @abstractmethod
    def stop(self, reason: str, now: float) -> None:
        """Stop as fast as the arm can, and stay still until a reset. The first reason is kept."""

    def poll(self, now: float) -> None:  # noqa: B027 - an ideal arm does nothing by itself
        """Check for events of the arm itself; set `stopped` if it has ended its motion."""

    def inside(self, joints: NDArray[np.float64]) -> bool:
        """Return whether the hand at `joints` [7] is above the table and in the workspace."""
        hand = hand_pose(joints[:, None])[0][:, 0]
        box = self.workspace
        within = box is None or bool((hand >= box.low).all() and (hand <= box.high).all())
        return within and bool(hand[2] > 0)

    @abstractmethod
    def _follow(self, goal: NDArray[np.float64], now: float) -> float:
        """Set the target to `goal` [7]; see `move`."""

    def _grip(self, close: bool) -> None:
        self.gripper_closed = close

    def _allowed(self, here: NDArray[np.float64], deltas: NDArray[np.float64], now: float) -> NDArray[np.float64]:
        """Return where a motion from `here` ends: within the limits, and as far as the hand stays in its workspace."""
        for share in _SHARES:
            goal = self._limited(here + share * deltas, now)
            if self.inside(goal):
                return goal
        return here

    def _limited(self, goal: NDArray[np.float64], now: float) -> NDArray[np.float64]:
        return np.clip(goal, self.low, self.high)

    def _reset_seconds(self, goal: NDArray[np.float64], now: float) -> float:
        """Return the duration of a reset's motion, in seconds."""
        return float((np.abs(goal - self.joints(now)) / (RESET_SPEED * VELOCITY_MAX)).max())


class SimulatedArm(Arm):
    """An ideal arm, which reaches its target by the end of the control period.

    Args:
        speed: the factor by which it is faster than a real arm.
    """

    name = "rlinf-simulated"

    def __init__(self, speed: float = 1.0) -> None:
        super().__init__()
        self._speed = speed
        self._from = self._to = HOME.copy()
        self._begin = self._end = 0.0

    def joints(self, now: float) -> NDArray[np.float64]:
        if now >= self._end:
            return self._to.copy()
        share = (now - self._begin) / (self._end - self._begin)
        return self._from + max(share, 0.0) * (self._to - self._from)

    def target(self, now: float) -> NDArray[np.float64]:
        return self._to.copy()

    def moves(self, now: float) -> bool:
        """See `Arm`; `now` may be a past moment."""
        return now < self._end

    @property
    def still_since(self) -> float:
        return self._end

    def reset(self, joints: NDArray[np.float64], now: float) -> float:
        self.stopped = None
        self.gripper_closed = self.clipped = False
        goal = self._limited(joints, now)
        return self._go(goal, self._reset_seconds(goal, now), now)

    def stop(self, reason: str, now: float) -> None:
        """See `Arm`: at once."""
        if self.moves(now):
            self._from = self._to = self.joints(now)
            self._begin = self._end = now
        self.stopped = self.stopped or reason

    def _follow(self, goal: NDArray[np.float64], now: float) -> float:
        least = float((np.abs(goal - self.joints(now)) / VELOCITY_MAX).max())
        left = (period_end(self._end, now, CONTROL_SECONDS / self._speed) - now) * self._speed
        # A late action catches up, but no joint exceeds its velocity.
        return self._go(goal, max(left, least), now)

    def _go(self, goal: NDArray[np.float64], seconds: float, now: float) -> float:
        self._from, self._to = self.joints(now), goal
        self._begin, self._end = now, now + seconds / self._speed
        return self._end


FRAME_SECONDS: Final = 1 / 30


class SimulatedCameras:
    """Cameras that take 30 frames a second until they freeze.

    Args:
        serials: the serial numbers of the cameras.
    """

    def __init__(self, serials: Iterable[str] = ()) -> None:
        self._frozen: dict[str, float | None] = dict.fromkeys(serials)

    def freeze(self, serial: str, now: float) -> None:
        """Have a camera take no frame after a time."""
        self._frozen[serial] = now

    def ages(self, now: float) -> dict[str, float]:
        """Return the seconds since the newest frame of each camera."""
        newest = {serial: now if end is None else min(end, now) for serial, end in self._frozen.items()}
        return {serial: now - moment // FRAME_SECONDS * FRAME_SECONDS for serial, moment in newest.items()}
