"""The base class of robots that a node group can declare, and the types of values in their descriptions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, Field, ValidationError

from rlinf_core.errors import ConfigError
from rlinf_core.scalars import Float, Int, StrictModel, Text, impossible_address, problem

# A variable of the node's environment in place of an address: `$ROBOT_IP`.
FROM_NODE: Final = "or `$NAME`: the value of this variable on the node"
_VARIABLE: Final = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")


def variable_of(text: str) -> str | None:
    """Return the variable's name if a variable is in place of an address, else None."""
    match = _VARIABLE.fullmatch(text)
    return None if match is None else match[1]


def _ip_address(text: str) -> str:
    if variable_of(text) is not None:
        return text
    wrong = impossible_address(text)
    if wrong is not None:
        is_name = re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*(\.[A-Za-z0-9-]+)*", text)
        help = f"give the address that `getent hosts {text}` shows" if is_name else "write it as in `10.10.10.1`"
        raise problem("bad-value", wrong, help=help)
    return text


def _serial(text: str) -> str:
    if not text.strip():
        raise problem("bad-value", "a serial number is missing here", help="remove the item or write the serial")
    return text


def _port(number: int) -> int:
    if not 0 < number < 65536:
        raise problem("bad-value", f"{number} is not a TCP port", help="write a number from 1 to 65535")
    return number


def _word(text: str) -> str:
    if not text or not text.isprintable() or any(map(str.isspace, text)):
        raise problem("bad-value", "must be one word without blanks", help="remove the key or write its value")
    return text


IpAddress = Annotated[Text, AfterValidator(_ip_address)]
Serial = Annotated[Text, AfterValidator(_serial)]
Serials = tuple[Serial, ...]
Port = Annotated[Int, AfterValidator(_port)]
NodeRank = Annotated[Int, Field(ge=0)]
# An address: a device file, a URL, a host.
Connection = Annotated[Text, AfterValidator(_word)]
CameraType = Literal["realsense", "zed", "v4l2"]
GripperType = Literal["franka", "robotiq"]


def _box(corners: tuple[Point, Point]) -> tuple[Point, Point]:
    low, high = corners
    if any(least >= most for least, most in zip(low, high, strict=True)):
        raise problem("bad-value", "the box between the two points is empty", help="write the lower corner first")
    return corners


Coordinate = Annotated[Float, Field(allow_inf_nan=False)]
Point = tuple[Coordinate, Coordinate, Coordinate]
Workspace = Annotated[tuple[Point, Point], AfterValidator(_box)]


class RobotUnit(StrictModel):
    """One robot: an entry of `hardware.configs`. A new robot is a subclass with additional fields.

    Attributes:
        exclusive: fields whose values must be unique, as the address of an arm.
        node_ranks: fields besides `node_rank` that hold the rank of a node.
        variables: the fields whose values may come from the node's environment: `$NAME` is its variable `NAME`.
    """

    exclusive: ClassVar[tuple[str, ...]] = ()
    node_ranks: ClassVar[tuple[str, ...]] = ()
    variables: ClassVar[tuple[str, ...]] = ()

    node_rank: NodeRank = Field(description="Rank of the node that the robot is attached to.")

    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Return the addresses where the robot must answer before a job starts: pairs of host and TCP port. None by
        default."""
        return ()

    def controller_nodes(self) -> tuple[int | None, ...]:
        """Return the rank of the node that runs the controller at each of `addresses`; None if unspecified."""
        return ()

    def cameras(self) -> tuple[tuple[str, str], ...]:
        """Return the cameras that must be attached before a job starts: pairs of make and serial number.

        By default those of `camera_serials` and `camera_type`, unless `disable_validate` is set.
        """
        if getattr(self, "disable_validate", False):
            return ()
        serials: tuple[str, ...] = getattr(self, "camera_serials", ())
        return tuple((str(getattr(self, "camera_type", "realsense")), serial) for serial in serials)

    def on_node(self, environ: Mapping[str, str]) -> Self:
        """Return the unit with its variables replaced by their values on the node.

        Args:
            environ: the environment of a process on the node.

        Raises:
            ConfigError: a variable is not set there, or its value is invalid.
        """
        names = {field: name for field in self.variables if (name := variable_of(str(getattr(self, field))))}
        if not names:
            return self
        for field, name in names.items():
            if not environ.get(name) or variable_of(environ[name]) is not None:
                raise self._unset(field, name, "is not set" if not environ.get(name) else "refers to another variable")
        values = {field: environ[name] for field, name in names.items()}
        try:
            return type(self).model_validate({**self.model_dump(), **values})
        except ValidationError as error:
            first = error.errors()[0]
            field = str(first["loc"][0])
            raise self._unset(field, names.get(field, ""), f"is wrong: {first['msg']}") from error

    def _unset(self, field: str, name: str, what: str) -> ConfigError:
        return ConfigError(
            f"`{field}: ${name}` of node {self.node_rank}: the variable `{name}` {what} there",
            help=f"set `{name}` in the `env_vars` of the robots' node group, or in the node's own environment before"
            " its cluster is started",
        )
