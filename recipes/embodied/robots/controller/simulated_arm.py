"""A simulated arm: joints move as commanded, at realistic speeds, and stop in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.robots.controller.arm import Arm, period_end
from recipes.embodied.robots.franka_arm import CONTROL_SECONDS
from recipes.embodied.robots.franka_kinematics import HOME, VELOCITY_MAX


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
