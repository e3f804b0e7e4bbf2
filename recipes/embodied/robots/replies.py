"""Replies of an arm's controller, as types, and its refusals as errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.robots.robot_errors import (
    RobotError,
    RobotLateError,
    RobotLeaseError,
    RobotRefusedError,
    RobotSilentError,
    RobotStoppedError,
)
from recipes.embodied.robots.wire_protocol import Message, ProtocolError, parse_joints


@dataclass(frozen=True, slots=True)
class ArmState:
    """The position and velocity of an arm.

    Attributes:
        joints: [7], measured, in radians.
        target: [7], to which the arm goes or which it holds, in radians.
        gripper_closed: whether it was commanded to close.
        stopped: why it stands still until a reset; None: it does not.
        holder: name of the holder; None: it is free.
        mode: what the arm does, in the word of its firmware.
        success_rate: share of the newest commands that reached the arm in time, from 0 to 1.
        clipped: a limit made the last motion shorter than asked.
        cameras: seconds since the newest frame of each camera that the controller sees, by serial number.
        tick: control periods of the controller's clock.
        heard_tick: the tick in which the holder was last heard.
        still_tick: the tick since which the arm stands still; None: it moves.
    """

    joints: NDArray[np.float64]
    target: NDArray[np.float64]
    gripper_closed: bool
    stopped: str | None
    holder: str | None
    mode: str = "idle"
    success_rate: float = 1.0
    clipped: bool = False
    cameras: Mapping[str, float] = field(default_factory=dict[str, float])
    tick: int = 0
    heard_tick: int = 0
    still_tick: int | None = None

    @classmethod
    def of(cls, reply: Message) -> Self:
        """Return the state in a reply.

        Raises:
            ProtocolError: it has no joints, or no target.
        """
        stopped, holder, still = reply.get("stopped"), reply.get("holder"), reply.get("still_tick")
        cameras = cast("dict[str, float]", reply.get("cameras") or {})
        return cls(
            np.array(parse_joints(reply, "joints")),
            np.array(parse_joints(reply, "target")),
            reply.get("gripper_closed") is True,
            None if stopped is None else str(stopped),
            None if holder is None else str(holder),
            str(reply.get("mode")),
            float(reply.get("success_rate") or 0.0),
            reply.get("clipped") is True,
            {str(serial): float(age) for serial, age in cameras.items()},
            int(reply.get("tick") or 0),
            int(reply.get("heard_tick") or 0),
            None if still is None else int(still),
        )


@dataclass(frozen=True, slots=True)
class ControllerFacts:
    """A controller's description of itself.

    Attributes:
        controller: its name.
        version: its version.
        firmware: the firmware of the arm; None: it does not say.
        period: seconds of a control period.
        velocity: [7], the fastest that each joint is moved, in radians a second.
        low: [7], the least position of each joint, in radians.
        high: [7], the greatest, likewise.
        holder: name of the holder; None: the arm is free.
    """

    controller: str
    version: str
    firmware: str | None
    period: float
    velocity: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    holder: str | None

    @classmethod
    def of(cls, reply: Message) -> Self:
        """Return the facts in a reply.

        Raises:
            ProtocolError: limits or period are missing, or are not numbers.
        """
        try:
            limits = cast("dict[str, Any]", reply["limits"])
            low, high, velocity = (parse_joints(limits, name) for name in ("low", "high", "velocity"))
            period = float(reply["period"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(str(error)) from error
        firmware, holder = reply.get("firmware"), reply.get("holder")
        return cls(
            str(reply.get("controller")),
            str(reply.get("version")),
            None if firmware is None else str(firmware),
            period,
            velocity,
            low,
            high,
            None if holder is None else str(holder),
        )


def refusal_error(reply: Message, where: str) -> RobotError:
    """Return the error for a refusal, which names the robot `where`."""
    code, message = reply.get("code"), str(reply.get("message"))
    holder = None if reply.get("holder") is None else str(reply["holder"])
    if code == "busy":
        return RobotLeaseError(
            "the arm is in use",
            holder=holder,
            where=where,
            why=message,
            help="end that process, or wait until it is done; give each env worker its own arm",
        )
    if code == "no-lease":
        return RobotLeaseError(
            "this process does not hold the arm",
            holder=holder,
            where=where,
            why=message,
            help="acquire it first; a lease is lost with its connection, or after a heartbeat of silence",
        )
    if code in ("stopped", "silent"):
        kind = RobotSilentError if code == "silent" else RobotStoppedError
        return kind(message, where=where, help="look at the arm, then reset it")
    if code == "late":
        return RobotLateError(
            "an action came too late and was not executed",
            where=where,
            why=message,
            help="check the link between this node and the controller: cable, switch, wireless, other traffic",
        )
    return RobotRefusedError(
        "the controller rejected the request",
        where=where,
        why=message,
        help="no action was executed; keep actions within -1 and 1, and starts within the workspace",
    )
