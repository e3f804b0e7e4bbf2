"""A Franka arm with its cameras and gripper."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from rlinf_core.hardware.robots.registry import register_hardware
from rlinf_core.hardware.robots.unit import RobotUnit
from rlinf_core.scalars import Bool, Int, Text, problem


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


def _port(number: int) -> int:
    if not 0 < number < 65536:
        raise problem("bad-value", f"{number} is no TCP port", help="write a number from 1 to 65535")
    return number


# Where an arm's controller listens when nothing else is said: below the ports that systems give out by themselves.
ROBOT_PORT = 17310

IpAddress = Annotated[Text, AfterValidator(_ip_address)]
Serial = Annotated[Text, AfterValidator(_serial)]
Port = Annotated[Int, AfterValidator(_port)]


@register_hardware("Franka")
class Franka(RobotUnit):
    """A Franka arm."""

    exclusive: ClassVar[tuple[str, ...]] = ("robot_ip", "camera_serials")

    robot_ip: IpAddress = Field(description="IP address of the arm's controller.")
    robot_port: Port = Field(default=ROBOT_PORT, description="TCP port of the arm's controller.")
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

    def addresses(self) -> tuple[tuple[str, int], ...]:
        """See `RobotUnit`."""
        return () if self.disable_validate else ((self.robot_ip, self.robot_port),)
