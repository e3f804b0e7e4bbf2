"""Robots with a validated description and a driver from a user's package."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from rlinf_core.hardware.robots.unit import (
    FROM_NODE,
    CameraType,
    Connection,
    Port,
    RobotUnit,
    Serials,
    register_hardware,
    variable_of,
)
from rlinf_core.scalars import Bool, Data, Text, problem


def _target(text: str) -> str:
    module, colon, name = text.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise problem("bad-value", f"`{text}` does not name a class", help="write `package.module:Class`")
    return text


def _serial_device(text: str) -> str:
    if variable_of(text) is None and not text.startswith("/dev/"):
        raise problem("bad-value", f"`{text}` is not a device", help="write its device file, as in `/dev/ttyACM0`")
    return text


DriverTarget = Annotated[Text, AfterValidator(_target)]
SerialDevice = Annotated[Connection, AfterValidator(_serial_device)]
_DRIVER = "Driver class for `env_type: robot`, `package.module:Class` (docs/robots.md)"


class PluginDrivenRobot(RobotUnit):
    """A robot with cameras and a user's driver."""

    exclusive: ClassVar[tuple[str, ...]] = ("camera_serials",)

    driver: DriverTarget | None = Field(default=None, description=f"{_DRIVER}. Default: none, for a custom `env_type`.")
    camera_serials: Serials = Field(
        default=(), description="Serial numbers of the robot's cameras, in the order of the environment's images."
    )
    camera_type: CameraType = Field(
        default="realsense", description="Vendor or interface of the cameras: `realsense`, `zed` or `v4l2`."
    )
    disable_validate: Bool = Field(
        default=False, description="Skip the check that the robot and its cameras answer before a job starts."
    )
    options: dict[str, Data] = Field(
        default_factory=dict[str, Any], description="Additional options of the robot's driver, by name."
    )

    @property
    def place(self) -> str:
        """The address of the robot, in words; its node if it has none."""
        return f"node {self.node_rank}"


@register_hardware("Robot")
class GenericRobot(PluginDrivenRobot):
    """Any robot: an address and a driver class."""

    exclusive: ClassVar[tuple[str, ...]] = ("address", "camera_serials")
    variables: ClassVar[tuple[str, ...]] = ("address",)

    driver: DriverTarget = Field(description=f"{_DRIVER}.")
    address: Connection = Field(
        description=f"Address of the robot for the driver: a host, `HOST:PORT`, a URL, a device file, {FROM_NODE}."
    )

    @property
    def place(self) -> str:
        """See `PluginDrivenRobot`."""
        return self.address

    def addresses(self) -> tuple[tuple[str, int], ...]:
        """See `RobotUnit`: only for `HOST:PORT`; other addresses are interpreted by the driver."""
        host, _, port = self.address.rpartition(":")
        named = host.removeprefix("[").removesuffix("]")
        if self.disable_validate or not named or "/" in host or not port.isascii() or not port.isdigit():
            return ()
        return ((named, int(port)),) if 0 < int(port) < 65536 else ()


@register_hardware("SO-101")
class SO101(PluginDrivenRobot):
    """An SO-101 arm on a serial port of its node."""

    exclusive: ClassVar[tuple[str, ...]] = ("device", "camera_serials")
    variables: ClassVar[tuple[str, ...]] = ("device",)

    device: SerialDevice = Field(
        description="Serial port of the arm's motor bus, preferably by id, as in"
        f" `/dev/serial/by-id/usb-1a86_USB_Single_Serial_58FD-if00`, {FROM_NODE}."
    )
    calibration: Connection | None = Field(
        default=None,
        description="File of the arm's calibration, as of `lerobot-calibrate`. Default: what its motors hold.",
    )

    @property
    def place(self) -> str:
        """See `PluginDrivenRobot`."""
        return self.device


def _port_of(arm: str) -> str:
    return f"TCP port of the {arm}. Default: the driver's."


@register_hardware("DOSW1")
class DOSW1(PluginDrivenRobot):
    """A two-arm DOS-W1, reached over the network. Its driver comes from a user's package."""

    variables: ClassVar[tuple[str, ...]] = ("robot_url",)

    robot_url: Connection = Field(
        default="127.0.0.1",
        description=f"Host of the robot's arms, {FROM_NODE}. Default: the robot's own node.",
    )
    left_arm_port: Port | None = Field(default=None, description=_port_of("left arm"))
    right_arm_port: Port | None = Field(default=None, description=_port_of("right arm"))
    left_lead_port: Port | None = Field(default=None, description=_port_of("left lead arm, which a person moves"))
    right_lead_port: Port | None = Field(default=None, description=_port_of("right lead arm, which a person moves"))

    @property
    def place(self) -> str:
        """See `PluginDrivenRobot`."""
        return self.robot_url


@register_hardware("Turtle2")
class Turtle2(PluginDrivenRobot):
    """A two-arm Turtle2. Its driver comes from a user's package."""


@register_hardware("GimArm")
class GimArm(PluginDrivenRobot):
    """A GimArm on its node's CAN bus. Its driver comes from a user's package."""
