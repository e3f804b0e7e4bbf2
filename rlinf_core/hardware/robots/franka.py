"""A Franka arm with its cameras and gripper."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from rlinf_core.hardware.robots.registry import register_hardware
from rlinf_core.hardware.robots.unit import RobotUnit
from rlinf_core.scalars import Bool, Text, problem


def _ip_address(text: str) -> str:
    # Imported here: only a file with a robot needs it.
    from ipaddress import ip_address

    try:
        ip_address(text)
    except ValueError:
        raise problem("bad-value", f"`{text}` is not an IP address", help="write it as in `10.10.10.1`") from None
    return text


def _serial(text: str) -> str:
    if not text.strip():
        raise problem("bad-value", "a serial number is missing here", help="remove the item or write the serial")
    return text


IpAddress = Annotated[Text, AfterValidator(_ip_address)]
Serial = Annotated[Text, AfterValidator(_serial)]


@register_hardware("Franka")
class Franka(RobotUnit):
    """A Franka arm."""

    exclusive: ClassVar[tuple[str, ...]] = ("robot_ip", "camera_serials")

    robot_ip: IpAddress = Field(description="IP address of the arm's controller.")
    camera_serials: tuple[Serial, ...] = Field(
        default=(), description="Serial numbers of the arm's cameras, in the order the environment shows them."
    )
    camera_type: Literal["realsense", "zed"] = Field(
        default="realsense", description="Make of the cameras: `realsense` or `zed`."
    )
    gripper_type: Literal["franka", "robotiq"] = Field(
        default="franka", description="Gripper on the arm: `franka` (Franka Hand) or `robotiq`."
    )
    disable_validate: Bool = Field(
        default=False, description="Skip the check that arm and cameras answer before a job starts."
    )
