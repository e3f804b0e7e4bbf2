"""The messages of the page: JSON over a WebSocket. Nothing is evaluated.

The first message is `{"token": "..."}`, and its reply `{"ok": true, "hz": 20}` or `{"ok": false, "message": "..."}`.
Each later one is either the number of the newest displayed image, `{"shown": 12}`, or a person's input, sent several
times a second:

    {"enabled": true, "keys": ["w"], "pressed": ["gripper"], "pad": null}

`keys` are held down, named as in `key_bindings.MOVES`; `pressed` are buttons that went down since the last message.
`pad` is a gamepad in the order of `PAD`. Nothing moves unless a person holds `enabled`.

The server sends its state as JSON. It sends each image as four bytes with the length of a JSON head, the head with
`camera`, `number` and `age` (in seconds when sent), and a JPEG.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, Field, StrictBool, ValidationError

from recipes.embodied.interventions.devices.event_device import pad_axes
from recipes.embodied.interventions.devices.keyboard import MOVES, key_axes
from recipes.embodied.interventions.intervention import Axes, Verdict
from recipes.embodied.interventions.person import Controls
from rlinf_core.foreign.strict_json import BadJsonError, load_json_object

MAX_MESSAGE: Final = 1024
# Left stick to the right and back, right stick likewise, left and right trigger, cross to the right.
PAD: Final = ("left_x", "left_y", "right_x", "right_y", "left_trigger", "right_trigger", "cross_x")
_VERDICTS: Final[dict[str, Verdict]] = {"success": "success", "failure": "failure", "discard": "discard"}
_MOST_KEYS: Final = 32


def _known(key: str) -> str:
    if key not in MOVES:
        raise ValueError("it is no key")
    return key


_Share: TypeAlias = Annotated[float, Field(strict=True, ge=-1, le=1, allow_inf_nan=False)]


class _Input(BaseModel):
    """The message with a person's input, see the module."""

    enabled: StrictBool
    keys: Annotated[list[Annotated[str, AfterValidator(_known)]], Field(max_length=_MOST_KEYS)]
    pressed: Annotated[
        list[Literal["success", "failure", "discard", "gripper", "reward"]], Field(max_length=_MOST_KEYS)
    ]
    pad: Annotated[list[_Share], Field(min_length=len(PAD), max_length=len(PAD))] | None = None


class BadMessageError(ValueError):
    """A text that is not a message."""


def decode(text: bytes) -> dict[str, Any]:
    """Return the message in a text.

    Raises:
        BadMessageError: the text is no JSON object.
    """
    try:
        return load_json_object(text)
    except BadJsonError as error:
        raise BadMessageError(f"a line that {error}") from None


def knows(message: Mapping[str, Any], token: str) -> bool:
    """Return whether a message contains the token, compared in constant time."""
    sent: object = message.get("token")
    return isinstance(sent, str) and hmac.compare_digest(sent.encode(), token.encode())


def shown(message: Mapping[str, Any]) -> int | None:
    """Return the number of the image that a message acknowledges; None if the message is an input.

    Raises:
        BadMessageError: the value is not a number.
    """
    if "shown" not in message:
        return None
    number: object = message["shown"]
    if type(number) is not int:
        raise BadMessageError("`shown` is not a number")
    return number


def controls_of(message: Mapping[str, Any]) -> Controls:
    """Return the controls in a message.

    Raises:
        BadMessageError: a value is missing or wrong.
    """
    try:
        said = _Input.model_validate(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadMessageError(f"`{first['loc'][0]}` is refused: {first['msg']}") from None
    keys, pressed = set(said.keys), set(said.pressed)
    linear, angular = _sum(key_axes(keys), key_axes(set()) if said.pad is None else pad_axes(*said.pad))
    controls = Controls(
        verdict=next((verdict for name, verdict in _VERDICTS.items() if name in pressed), None),
        rewards="reward" in pressed,
    )
    if not said.enabled:
        return controls
    return controls._replace(linear=linear, angular=angular, engaged=True, toggles_gripper="gripper" in pressed)


def packed(camera: str, number: int, age: float, jpeg: bytes) -> bytes:
    """Return a picture as a message."""
    head = json.dumps({"camera": camera, "number": number, "age": round(age, 4)}).encode()
    return len(head).to_bytes(4, "big") + head + jpeg


def _sum(first: tuple[Axes, Axes], second: tuple[Axes, Axes]) -> tuple[Axes, Axes]:
    """Return the sum of motions, each number from -1 to 1."""
    totals = [max(-1.0, min(1.0, a + b)) for a, b in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True)]
    return (totals[0], totals[1], totals[2]), (totals[3], totals[4], totals[5])
