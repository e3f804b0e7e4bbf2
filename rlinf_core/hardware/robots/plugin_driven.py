"""Robots with a checked description and a controller from a user's package."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from rlinf_core.hardware.robots.registry import register_hardware
from rlinf_core.hardware.robots.unit import CameraType, Connection, RobotUnit, Serials
from rlinf_core.scalars import Bool, Data


class PluginDrivenRobot(RobotUnit):
    """A robot with cameras and a controller of the user's."""

    exclusive: ClassVar[tuple[str, ...]] = ("camera_serials",)

    camera_serials: Serials = Field(
        default=(), description="Serial numbers of the robot's cameras, in the order the environment shows them."
    )
    camera_type: CameraType = Field(default="realsense", description="Make of the cameras: `realsense` or `zed`.")
    disable_validate: Bool = Field(
        default=False, description="Skip the check that the cameras answer before a job starts."
    )
    options: dict[str, Data] = Field(
        default_factory=dict[str, Any], description="What else the robot's controller is to be told, by name."
    )


@register_hardware("DOSW1")
class DOSW1(PluginDrivenRobot):
    """A DOS-W1 with its two arms, reached over the network. A package of yours brings its controller."""

    robot_url: Connection = Field(
        default="127.0.0.1", description="Host at which the robot's arms answer. Default: the robot's own node."
    )


@register_hardware("Turtle2")
class Turtle2(PluginDrivenRobot):
    """A Turtle2 with its two arms. A package of yours brings its controller."""


@register_hardware("GimArm")
class GimArm(PluginDrivenRobot):
    """A GimArm on its node's CAN bus. A package of yours brings its controller."""
