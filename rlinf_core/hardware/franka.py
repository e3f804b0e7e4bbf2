"""Franka arms with their cameras and grippers: one arm, or two that act as one robot."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rlinf_core.hardware.robots import (
    FROM_NODE,
    CameraType,
    Connection,
    GripperType,
    IpAddress,
    NodeRank,
    Port,
    RobotUnit,
    Serials,
    Workspace,
    register_hardware,
)
from rlinf_core.scalars import Bool

# The default port of an arm's controller, below the ephemeral range.
ROBOT_PORT = 17310

_GRIPPERS = "`franka` (Franka Hand) or `robotiq`"
_CONNECTION = "Device of the gripper, as in `/dev/ttyUSB0`, passed to the controller. Default: the arm's own."
_CONTROLLER_RANK = (
    "Rank of the node that runs the arm's controller, if not `node_rank`. It is named if the controller does not"
    " answer; rlinf does not start controllers."
)


@register_hardware("Franka")
class Franka(RobotUnit):
    """A Franka arm."""

    exclusive: ClassVar[tuple[str, ...]] = ("robot_ip", "camera_serials")
    node_ranks: ClassVar[tuple[str, ...]] = ("controller_node_rank",)
    variables: ClassVar[tuple[str, ...]] = ("robot_ip",)

    robot_ip: IpAddress = Field(description=f"IP address of the arm's controller, {FROM_NODE}.")
    robot_port: Port = Field(default=ROBOT_PORT, description="TCP port of the arm's controller.")
    camera_serials: Serials = Field(
        default=(), description="Serial numbers of the arm's cameras, in the order of the environment's images."
    )
    camera_type: CameraType = Field(
        default="realsense", description="Vendor or interface of the cameras: `realsense`, `zed` or `v4l2`."
    )
    gripper_type: GripperType = Field(default="franka", description=f"Gripper on the arm: {_GRIPPERS}.")
    gripper_connection: Connection | None = Field(default=None, description=_CONNECTION)
    controller_node_rank: NodeRank | None = Field(default=None, description=_CONTROLLER_RANK)
    workspace: Workspace | None = Field(
        default=None,
        description="Workspace of the hand: two corners [x, y, z] in metres relative to the arm's base, the lower"
        " one first; the controller clips motions to it. Default: the controller's own.",
    )
    disable_validate: Bool = Field(
        default=False, description="Skip the check that arm and cameras answer before a job starts."
    )

    def addresses(self) -> tuple[tuple[str, int], ...]:
        """See `RobotUnit`."""
        return () if self.disable_validate else ((self.robot_ip, self.robot_port),)


@register_hardware("DualFranka")
class DualFranka(RobotUnit):
    """Two Franka arms that act as one robot. Its controller comes from a user's package."""

    exclusive: ClassVar[tuple[str, ...]] = (
        "left_robot_ip",
        "right_robot_ip",
        "left_camera_serials",
        "right_camera_serials",
        "base_camera_serials",
    )
    node_ranks: ClassVar[tuple[str, ...]] = ("left_controller_node_rank", "right_controller_node_rank")
    variables: ClassVar[tuple[str, ...]] = ("left_robot_ip", "right_robot_ip")

    left_robot_ip: IpAddress = Field(description=f"IP address of the left arm's controller, {FROM_NODE}.")
    right_robot_ip: IpAddress = Field(description=f"IP address of the right arm's controller, {FROM_NODE}.")
    robot_port: Port = Field(default=ROBOT_PORT, description="TCP port of both controllers.")
    left_camera_serials: Serials = Field(default=(), description="Serial numbers of the cameras on the left wrist.")
    right_camera_serials: Serials = Field(default=(), description="Serial numbers of the cameras on the right wrist.")
    base_camera_serials: Serials = Field(default=(), description="Serial numbers of the external cameras.")
    camera_type: CameraType = Field(
        default="realsense", description="Default vendor of the cameras: `realsense`, `zed` or `v4l2`."
    )
    left_camera_type: CameraType | None = Field(
        default=None, description="Vendor of the cameras on the left wrist. Default: `camera_type`."
    )
    right_camera_type: CameraType | None = Field(
        default=None, description="Vendor of the cameras on the right wrist. Default: `camera_type`."
    )
    base_camera_type: CameraType | None = Field(
        default=None, description="Vendor of the external cameras. Default: `camera_type`."
    )
    left_gripper_type: GripperType = Field(default="franka", description=f"Gripper on the left arm: {_GRIPPERS}.")
    right_gripper_type: GripperType = Field(default="franka", description=f"Gripper on the right arm: {_GRIPPERS}.")
    left_gripper_connection: Connection | None = Field(default=None, description=_CONNECTION)
    right_gripper_connection: Connection | None = Field(default=None, description=_CONNECTION)
    left_controller_node_rank: NodeRank | None = Field(default=None, description=_CONTROLLER_RANK)
    right_controller_node_rank: NodeRank | None = Field(default=None, description=_CONTROLLER_RANK)
    disable_validate: Bool = Field(
        default=False, description="Skip the check that arms and cameras answer before a job starts."
    )

    def addresses(self) -> tuple[tuple[str, int], ...]:
        """See `RobotUnit`."""
        arms = (self.left_robot_ip, self.right_robot_ip)
        return () if self.disable_validate else tuple((arm, self.robot_port) for arm in arms)

    def cameras(self) -> tuple[tuple[str, str], ...]:
        """See `RobotUnit`."""
        if self.disable_validate:
            return ()
        places = (
            (self.left_camera_type, self.left_camera_serials),
            (self.right_camera_type, self.right_camera_serials),
            (self.base_camera_type, self.base_camera_serials),
        )
        return tuple((make or self.camera_type, serial) for make, serials in places for serial in serials)
