"""The messages between a client and an arm's controller, over TCP.

Each message is one line of JSON in UTF-8, an object of at most 4096 bytes. A request has an `op` and an `id`; the reply
repeats the id and says `ok`. Nothing is unpickled or evaluated, and any other line ends the connection.

    {"op": "acquire", "id": 1, "holder": "process 71 on lab-3", "heartbeat": 2.0}
    {"id": 1, "ok": true, "joints": [...], "gripper_closed": false, "stopped": null, "holder": "process 71 on lab-3"}

| op | needs the lease | what it does |
|---|---|---|
| `ping` | | says what this is, its protocol, controller, firmware, limits and control period, and who holds it |
| `state` | | joints in radians, gripper, whether and why the arm was stopped, ages of the cameras' newest frames |
| `acquire` | | takes the lease, with a `holder` in words, the `heartbeat` in seconds, `gripper` and `workspace` |
| `beat` | | has no reply; every line counts as a sign of life, this one is for when there is nothing to say |
| `reset` | yes | moves to `joints`, opens the gripper, ends a stop; the reply comes when the arm is there |
| `move` | yes | moves the target by `deltas` (radians); with `close_gripper`, `after` and `waited` |
| `stop` | | stops the arm at once, for anybody |
| `release` | yes | gives the lease back |

A `move` sets the target that the arm follows, and is answered at the end of its control period: with the accepted
`target`, the measured `joints`, which may lag behind it, the `mode` of the arm, and the `success_rate` of its commands.
No pause is needed between moves.

`close_gripper` is true, false, or null to leave the gripper. `after` is the `clock` of the reply that a `move` follows,
`waited` the seconds since that came. A `workspace` is two points [x, y, z] in meters, the corners of the box in which
the hand must stay. A `gripper` is an object with a `type` (`franka`, `robotiq`) and a `connection`, the device that it
is attached to, or null for the arm's own.

A holder that is silent for its heartbeat, or whose connection ends, loses the lease, and the arm stops. A moving arm
also stops after two control periods of silence: only the holder's signs of life keep it moving. A `move` in transit for
longer than that, measured from the reply that it follows to its arrival, less the time that its sender waited, is
refused as `late`. Two clocks are never compared.

Replies of `state` and motions give times in ticks, the controller's own control periods: the current one (`tick`), the
one in which the holder was last heard (`heard_tick`), and the one since which the arm stands still (`still_tick`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictInt,
    TypeAdapter,
    ValidationError,
)

from rlinf_core.foreign.strict_json import BadJsonError, load_json_object

PROTOCOL = 3
NAME = "franka"
MAX_LINE = 4096  # bytes, the newline included
NUM_JOINTS = 7
HEARTBEAT_LOW, HEARTBEAT_HIGH = 0.1, 60.0  # seconds between signs of life that a holder may ask for
MAX_HOLDER = 120  # characters

Message: TypeAlias = dict[str, Any]


class ProtocolError(ValueError):
    """A line that is not a message, or a message with invalid content."""


@dataclass(frozen=True, slots=True)
class ControllerRequest:
    """One request.

    Attributes:
        op: the requested operation.
        id: the id, which its reply repeats.
        fields: everything else, unchecked.
    """

    op: str
    id: int
    fields: Mapping[str, Any]


class Box(NamedTuple):
    """A box along the axes of the arm's base.

    Attributes:
        low: the lowest x, y, z, in meters.
        high: the highest x, y, z, in meters.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as a line.

    Raises:
        ProtocolError: the message is too long, or is not valid JSON.
    """
    try:
        line = json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"not a message: {error}") from error
    if len(line) > MAX_LINE:
        raise ProtocolError(f"a message of {len(line)} bytes; {MAX_LINE} are allowed")
    return line


def decode(line: bytes) -> Message:
    """Return the message in a line.

    Raises:
        ProtocolError: the line holds no message.
    """
    if len(line) > MAX_LINE:
        raise ProtocolError(f"a line of more than {MAX_LINE} bytes")
    try:
        return load_json_object(line)
    except BadJsonError as error:
        raise ProtocolError(f"a line that {error}") from None


def request_of(message: Message) -> ControllerRequest:
    """Return a message as a request.

    Raises:
        ProtocolError: the message is no request.
    """
    fields = dict(message)
    op, number = fields.pop("op", None), fields.pop("id", 0)
    if not isinstance(op, str) or type(number) is not int or not 0 <= number < 2**53:
        raise ProtocolError("a message without `op`, or with an invalid `id`")
    return ControllerRequest(op, number, fields)


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it is not printable")
    return text


_Number: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Text: TypeAlias = Annotated[str, Field(max_length=MAX_HOLDER), AfterValidator(_printable)]
_Point: TypeAlias = tuple[_Number, _Number, _Number]
_SEVEN: TypeAdapter[tuple[float, ...]] = TypeAdapter(
    Annotated[tuple[_Number, ...], Field(min_length=NUM_JOINTS, max_length=NUM_JOINTS)]
)
_CORNERS: TypeAdapter[tuple[_Point, _Point]] = TypeAdapter(tuple[_Point, _Point])


def box_of(corners: object) -> Box:
    """Return the box between two points of three finite numbers, the lower one first.

    Raises:
        ValueError: the box is empty, or the corners are something else.
    """
    try:
        low, high = _CORNERS.validate_python(corners)
    except ValidationError:
        raise ValueError("it is not a pair of points of three finite numbers") from None
    if any(least >= most for least, most in zip(low, high, strict=True)):
        raise ValueError("it is empty")
    return Box(low, high)


def _joints(value: object) -> NDArray[np.float64]:
    try:
        return np.array(_SEVEN.validate_python(value))
    except ValidationError:
        raise ValueError(f"it is not {NUM_JOINTS} finite numbers") from None


# [7], in radians, or in radians per second.
Joints: TypeAlias = Annotated[NDArray[np.float64], PlainValidator(_joints)]


class _Fields(BaseModel):
    """The fields of a message; others are ignored."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True, populate_by_name=True)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Return the fields of a message.

        Raises:
            ProtocolError: a field is missing, or has another type.
        """
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise ProtocolError(f"`{'.'.join(map(str, first['loc']))}` is refused: {first['msg']}") from None


class Gripper(_Fields):
    """The gripper on an arm.

    Attributes:
        type: its make, as in `robotiq`.
        connection: the device that it is attached to, as in `/dev/ttyUSB0`; None: the arm's own.
    """

    type: _Text
    connection: _Text | None = None


class Acquiring(_Fields):
    """The fields of `acquire`, see the module.

    Attributes:
        holder: the name of the client that takes the lease.
        heartbeat: seconds without a sign of life after which the holder counts as lost.
        gripper: the gripper on the arm; None: not given.
        workspace: the box that the hand must stay in; None: not given.
    """

    holder: Annotated[_Text, Field(min_length=1)]
    heartbeat: Annotated[_Number, Field(ge=HEARTBEAT_LOW, le=HEARTBEAT_HIGH)]
    gripper: Gripper | None = None
    workspace: Annotated[Box, PlainValidator(box_of)] | None = None


class Resetting(_Fields):
    """The fields of `reset`."""

    joints: Joints


class Moving(_Fields):
    """The fields of `move`, see the module.

    Attributes:
        deltas: [7], the motion of the target, in radians.
        close_gripper: whether to close or open the gripper; None: leave it.
        after: the clock of the reply that it follows; None: the message has no times.
        waited: seconds since that reply came.
    """

    deltas: Joints
    close_gripper: StrictBool | None = None
    after: _Number | None = None
    waited: _Number | None = None

    def delay(self, clock: float) -> float:
        """Return the seconds that the move and the previous reply were in transit; 0 without times.

        Raises:
            ProtocolError: one of `after` and `waited` is missing.
        """
        if self.after is None:
            return 0.0
        if self.waited is None:
            raise ProtocolError("`waited` is missing")
        return clock - self.after - self.waited


class ArmState(_Fields):
    """The state of an arm, in replies of `state` and motions.

    Attributes:
        joints: [7], measured joint angles, in radians.
        target: [7], the angles that the arm moves to or holds, in radians.
        gripper_closed: whether the gripper was commanded to close.
        stopped: why the arm stands still until a reset; None: it is not stopped.
        holder: name of the holder; None: the arm is free.
        mode: the mode of the arm, in its firmware's word.
        success_rate: share of the newest commands that reached the arm in time, from 0 to 1.
        clipped: whether a limit shortened the last motion.
        cameras: seconds since the newest frame of each camera that the controller reads, by serial number.
        tick: the controller's clock, in control periods.
        heard_tick: the tick in which the holder was last heard.
        still_tick: the tick since which the arm stands still; None: it moves.
    """

    joints: Joints
    target: Joints
    gripper_closed: StrictBool = False
    stopped: str | None = None
    holder: str | None = None
    mode: str = "idle"
    success_rate: _Number = 1.0
    clipped: StrictBool = False
    cameras: dict[str, _Number] = Field(default_factory=dict[str, float])
    tick: StrictInt = 0
    heard_tick: StrictInt = 0
    still_tick: StrictInt | None = None


class ControllerFacts(_Fields):
    """A controller's description of itself, in a reply of `ping`.

    Attributes:
        controller: its name.
        version: its version.
        firmware: the firmware of the arm; None: not reported.
        period: seconds of a control period.
        velocity: [7], the largest velocity of each joint, in radians per second.
        low: [7], the lowest position of each joint, in radians.
        high: [7], the highest position of each joint, in radians.
        holder: name of the holder; None: the arm is free.
    """

    controller: str
    version: str
    firmware: str | None = None
    period: _Number
    velocity: Annotated[Joints, Field(validation_alias=AliasPath("limits", "velocity"))]
    low: Annotated[Joints, Field(validation_alias=AliasPath("limits", "low"))]
    high: Annotated[Joints, Field(validation_alias=AliasPath("limits", "high"))]
    holder: str | None = None
