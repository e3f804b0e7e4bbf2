"""The messages between a client and an arm's controller, over TCP.

Each message is one line of JSON in UTF-8, an object of at most 4096 bytes. A request has an `op` and an `id`; the reply
repeats the id and says `ok`. Nothing is unpickled or evaluated, and a line that is anything else ends the connection.

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
No rest is needed between two of them.

`close_gripper` is true, false, or null: it stays. `after` is the `clock` of the reply that a `move` follows, `waited`
the seconds since that came. A `workspace` is two points [x, y, z] in metres between which the hand must stay. A
`gripper` is an object of a `type` (`franka`, `robotiq`) and a `connection`, the device that it is attached to, or null
where it is the arm's own.

A holder that says nothing for its heartbeat, or whose connection ends, loses the lease, and the arm stops. While the
arm moves silence of two control periods stops it, too: nothing but the holder's signs of life keeps it going.
A `move` that was under way for longer than that, from the reply it follows until its arrival less the time that its
sender waited, is refused as `late`. No two clocks are compared.

Replies of `state` and motions give times in ticks, the controller's own control periods: the present one (`tick`),
the one in which the holder was last heard (`heard_tick`), and that since which the arm stands still (`still_tick`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

from rlinf_core.foreign.strict_json import BadJsonError, load_json_object

PROTOCOL = 3
NAME = "franka"
MAX_LINE = 4096  # bytes, the newline included
NUM_JOINTS = 7
HEARTBEAT_LOW, HEARTBEAT_HIGH = 0.1, 60.0  # seconds between signs of life that a holder may ask for
MAX_HOLDER = 120  # characters

Message: TypeAlias = dict[str, Any]


class ProtocolError(ValueError):
    """A line that is not a message, or a message that says nothing meaningful."""


@dataclass(frozen=True, slots=True)
class ControllerRequest:
    """One request.

    Attributes:
        op: what is asked.
        id: the id by which its reply is known.
        fields: everything else, not checked yet.
    """

    op: str
    id: int
    fields: Mapping[str, Any]


class Box(NamedTuple):
    """A box along the axes of the arm's base.

    Attributes:
        low: x, y, z in metres.
        high: likewise.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]


class Gripper(NamedTuple):
    """The gripper on an arm.

    Attributes:
        type: its make, as in `robotiq`.
        connection: the device that it is attached to, as in `/dev/ttyUSB0`; None: the arm's own.
    """

    type: str
    connection: str | None


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as a line.

    Raises:
        ProtocolError: it is too long, or is not valid JSON.
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
        ProtocolError: there is none.
    """
    if len(line) > MAX_LINE:
        raise ProtocolError(f"a line of more than {MAX_LINE} bytes")
    try:
        return load_json_object(line)
    except BadJsonError as error:
        raise ProtocolError(f"a line that {error}") from None


def request_of(message: Message) -> ControllerRequest:
    """Return the request that a message is.

    Raises:
        ProtocolError: it is none.
    """
    fields = dict(message)
    op, number = fields.pop("op", None), fields.pop("id", 0)
    if not isinstance(op, str) or type(number) is not int or not 0 <= number < 2**53:
        raise ProtocolError("a message without `op`, or with an invalid `id`")
    return ControllerRequest(op, number, fields)


def parse_joints(fields: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """Seven finite numbers.

    Raises:
        ProtocolError: `name` holds something else.
    """
    value = fields.get(name)
    numbers = cast("list[object]", value) if isinstance(value, list) else []
    if len(numbers) != NUM_JOINTS:
        raise ProtocolError(f"`{name}` is not {NUM_JOINTS} numbers")
    return tuple(_number(number, name) for number in numbers)


def parse_workspace(fields: Mapping[str, Any]) -> Box | None:
    """Return the box that the hand must stay in; None where nothing is said of it.

    Raises:
        ProtocolError: it is not a box.
    """
    value = fields.get("workspace")
    if value is None:
        return None
    corners = cast("list[object]", value) if isinstance(value, list) else []
    points = [cast("list[object]", corner) if isinstance(corner, list) else [] for corner in corners]
    if [len(point) for point in points] != [3, 3]:
        raise ProtocolError("`workspace` is not a pair of points of three numbers")
    low, high = (tuple(_number(coordinate, "workspace") for coordinate in point) for point in points)
    if any(least >= most for least, most in zip(low, high, strict=True)):
        raise ProtocolError("`workspace` is empty")
    return Box(low, high)


def parse_delay(fields: Mapping[str, Any], clock: float) -> float:
    """Return the round-trip seconds of a request and the reply before it; 0 if it carries no times.

    Raises:
        ProtocolError: `after` or `waited` is not a number.
    """
    if fields.get("after") is None:
        return 0.0
    return clock - _number(fields["after"], "after") - _number(fields.get("waited"), "waited")


def parse_heartbeat(fields: Mapping[str, Any]) -> float:
    """Return seconds without a sign of life after which a holder counts as lost.

    Raises:
        ProtocolError: it is not a number, or none that is allowed.
    """
    seconds = _number(fields.get("heartbeat"), "heartbeat")
    if not HEARTBEAT_LOW <= seconds <= HEARTBEAT_HIGH:
        raise ProtocolError(f"`heartbeat` is not between {HEARTBEAT_LOW} and {HEARTBEAT_HIGH} seconds")
    return seconds


def parse_holder(fields: Mapping[str, Any]) -> str:
    """Return who takes the lease, in words.

    Raises:
        ProtocolError: it is not printable.
    """
    holder = fields.get("holder")
    if not isinstance(holder, str) or not 0 < len(holder) <= MAX_HOLDER or not holder.isprintable():
        raise ProtocolError(f"`holder` is not a name of 1 to {MAX_HOLDER} characters")
    return holder


def parse_gripper(fields: Mapping[str, Any]) -> Gripper | None:
    """Return the gripper that is on the arm; None where nothing is said of it.

    Raises:
        ProtocolError: it is described otherwise.
    """
    value = fields.get("gripper")
    if value is None:
        return None
    described = cast("Mapping[str, object]", value) if isinstance(value, Mapping) else dict[str, object]()
    kind, connection = described.get("type"), described.get("connection")
    for text in (kind, "" if connection is None else connection):
        if not isinstance(text, str) or len(text) > MAX_HOLDER or not text.isprintable():
            raise ProtocolError("`gripper` is not an object with `type` and `connection`")
    return Gripper(str(kind), None if connection is None else str(connection))


def parse_grip(fields: Mapping[str, Any]) -> bool | None:
    """Return whether the gripper is to close; None: it stays.

    Raises:
        ProtocolError: it is anything else.
    """
    value = fields.get("close_gripper")
    if value is not None and not isinstance(value, bool):
        raise ProtocolError("`close_gripper` is not true, false or null")
    return value


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProtocolError(f"`{name}` is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise ProtocolError(f"`{name}` is too large") from None
    if not math.isfinite(number):
        raise ProtocolError(f"`{name}` is not finite")
    return number
