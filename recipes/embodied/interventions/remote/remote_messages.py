"""The messages of a person elsewhere: lines of JSON over TCP. Nothing is unpickled or evaluated.

The first line is `{"token": "..."}`, and its reply `{"ok": true}` with the pace in steps a second; after a wrong token
the connection ends. Every line that follows is the state of the device, sent several times a second:

    {"linear": [0.5, 0, 0], "angular": [0, 0, 0], "engaged": true, "toggles_gripper": false, "verdict": null,
     "rewards": false}
"""

from __future__ import annotations

import hmac
import json
from typing import Any, Final, cast

from recipes.embodied.interventions.intervention import Axes
from recipes.embodied.interventions.person import Controls
from rlinf_core.foreign.strict_json import BadJsonError, load_json_object

MAX_LINE: Final = 1024


class BadMessageError(ValueError):
    """A line that is not a message."""


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the message in a line.

    Raises:
        BadMessageError: it does not exist.
    """
    try:
        return load_json_object(line)
    except BadJsonError as error:
        raise BadMessageError(f"a line that {error}") from None


def knows(message: dict[str, Any], token: str) -> bool:
    """Return whether a message contains the token, compared in constant time."""
    sent: object = message.get("token")
    return isinstance(sent, str) and hmac.compare_digest(sent.encode(), token.encode())


def to_message(controls: Controls) -> dict[str, Any]:
    """Return controls as a message."""
    return {**controls._asdict(), "linear": list(controls.linear), "angular": list(controls.angular)}


def controls_of(message: dict[str, Any]) -> Controls:
    """Return the controls in a message.

    Raises:
        BadMessageError: a value is missing or wrong.
    """
    flags: list[bool] = []
    for name in ("engaged", "toggles_gripper", "rewards"):
        flag = message.get(name, False)
        if not isinstance(flag, bool):
            raise BadMessageError(f"`{name}` is neither true nor false")
        flags.append(flag)
    verdict = message.get("verdict")
    if verdict not in (None, "success", "failure", "discard"):
        raise BadMessageError("`verdict` is neither success, failure nor discard")
    return Controls(_axes(message, "linear"), _axes(message, "angular"), flags[0], flags[1], verdict, flags[2])


def _axes(message: dict[str, Any], name: str) -> Axes:
    value: object = message.get(name)
    numbers = cast("list[object]", value) if isinstance(value, list) else []
    values = [
        float(number)
        for number in numbers
        if isinstance(number, int | float) and not isinstance(number, bool) and abs(number) <= 1
    ]
    if len(numbers) != 3 or len(values) != 3:
        raise BadMessageError(f"`{name}` is not a list of three numbers from -1 to 1")
    return values[0], values[1], values[2]
