"""The base class of robots that a node group can declare."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlinf_core.scalars import Int, StrictModel


class RobotUnit(StrictModel):
    """One robot: an entry of `hardware.configs`. A new robot is a subclass with fields of its own.

    Attributes:
        exclusive: the fields whose values belong to one unit only: the address of an arm, the serial of a camera. Two
            units with the same one are an error.
        node_ranks: further fields that hold the rank of a node, besides `node_rank`.
    """

    exclusive: ClassVar[tuple[str, ...]] = ()
    node_ranks: ClassVar[tuple[str, ...]] = ()

    node_rank: Annotated[Int, Field(ge=0)] = Field(description="Rank of the node that the robot is attached to.")

    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Return where the robot must answer before a job starts: pairs of host and TCP port. None by default."""
        return ()

    def controller_nodes(self) -> tuple[int | None, ...]:
        """Return the rank of the node that runs the controller at each of `addresses`; None where nothing is said."""
        return ()

    def cameras(self) -> tuple[tuple[str, str], ...]:
        """Return the cameras that must be attached before a job starts: pairs of make and serial number.

        By default those of `camera_serials` and `camera_type`, unless `disable_validate` is set.
        """
        if getattr(self, "disable_validate", False):
            return ()
        serials: tuple[str, ...] = getattr(self, "camera_serials", ())
        return tuple((str(getattr(self, "camera_type", "realsense")), serial) for serial in serials)
