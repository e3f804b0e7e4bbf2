"""What is common to every robot that a node group can declare."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from rlinf_core.scalars import Int


class RobotUnit(BaseModel):
    """One robot: an entry of `hardware.configs`. A new robot is a subclass with fields of its own.

    `exclusive` names the fields whose values belong to one unit only: the address of an arm, the serial of a
    camera. Two units with the same one are an error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    exclusive: ClassVar[tuple[str, ...]] = ()

    node_rank: Annotated[Int, Field(ge=0)] = Field(description="Rank of the node that the robot is attached to.")

    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Return where it must answer before a job starts: host and TCP port of each place. By default nowhere is
        looked.
        """
        return ()
