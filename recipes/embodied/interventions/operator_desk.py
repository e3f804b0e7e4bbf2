"""The remote operator: their token, their requests since the last step, their view, and the handling of silence.
Opens no sockets, and takes times as arguments.

The messages of the page are JSON over a WebSocket. Nothing is evaluated. The first is `{"token": "..."}`, and its reply
`{"ok": true, "hz": 20}` or `{"ok": false, "message": "..."}`. Each later one is either the number of the newest
displayed image, `{"shown": 12}`, or a person's input, sent several times a second:

    {"enabled": true, "keys": ["w"], "pressed": ["gripper"], "pad": null}

`keys` are held down, named as in `keyboard.MOVES`; `pressed` are buttons that went down since the last message. `pad`
is a gamepad in the order of `PAD`. Nothing moves unless a person holds `enabled`. The server sends its state as JSON,
and each image as four bytes with the length of a JSON head, the head with `camera`, `number` and `age` (in seconds when
sent), and a JPEG.
"""

from __future__ import annotations

import hmac
import io
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import AfterValidator, BaseModel, Field, StrictBool, ValidationError

from recipes.embodied.cameras.drivers import CameraView
from recipes.embodied.config.intervention_types import BrowserOptions
from recipes.embodied.interventions.event_device import pad_axes
from recipes.embodied.interventions.intervention import Axes, InterventionError, Verdict
from recipes.embodied.interventions.keyboard import MOVES, key_axes
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


def read_token(file: str) -> str:
    """Return the token in a file.

    Raises:
        InterventionError: the file cannot be read, is empty, or is readable by other users.
    """
    how = "create one with `(umask 077; openssl rand -hex 32 > FILE)`, with the same content on both sides"
    try:
        mode = os.stat(file).st_mode
        token = Path(file).read_text("utf-8").strip().partition("\n")[0]
    except (OSError, UnicodeDecodeError) as error:
        raise InterventionError("the token cannot be read", where=file, why=str(error), help=how) from error
    if stat.S_IMODE(mode) & 0o077:
        raise InterventionError("other users may read the token", where=file, help=f"run `chmod 600 {file}`")
    if len(token) < 16:
        raise InterventionError("the token is shorter than 16 characters", where=file, help=how)
    return token


def cannot_listen(source: str, options: BrowserOptions, error: OSError) -> InterventionError:
    """Return the error for an address on which a source of interventions cannot be reached."""
    return InterventionError(
        f"cannot listen on {options.host}:{options.port}",
        where=source,
        why=error.strerror or str(error),
        help="choose an address of this node and a free port; each env worker of a node needs its own",
    )


def merged(controls: Sequence[Controls]) -> Controls | None:
    """Return the newest controls, with all button presses of earlier ones; None without controls."""
    if not controls:
        return None
    # A button press counts, however soon the next message followed.
    return controls[-1]._replace(
        verdict=next((control.verdict for control in controls if control.verdict is not None), None),
        toggles_gripper=sum(control.toggles_gripper for control in controls) % 2 == 1,
        rewards=any(control.rewards for control in controls),
    )


class OperatorLink:
    """Holds an arm whose operator falls silent while in charge, and ends the run if the silence lasts.

    Args:
        options: `hold_steps`, after which the arm is held (at once if the connection has ended), and `lost_steps`,
            after which the run ends.
        where: the source and its address, for errors.
    """

    def __init__(self, options: BrowserOptions, where: str) -> None:
        self._options, self._where = options, where
        self._silent = 0
        self._last = Controls()

    def step(self, heard: Controls | None, *, connected: bool) -> Controls:
        """Return the controls of a step.

        Args:
            heard: the controls since the last step; None: none came.
            connected: whether the operator is connected.

        Raises:
            InterventionError: the operator was in charge, and has been silent for too long.
        """
        if heard is not None:
            self._silent, self._last = 0, heard
            return heard
        self._silent += 1
        if not self._last.engaged and not any((*self._last.linear, *self._last.angular)):
            return Controls()
        if self._silent >= self._options.lost_steps:
            raise InterventionError(
                f"the operator has been silent for {self._silent} steps",
                where=self._where,
                help="reconnect in time, or release control before leaving",
            )
        if self._silent >= self._options.hold_steps or not connected:
            return Controls(engaged=True)
        return Controls(self._last.linear, self._last.angular, engaged=True)


class DeskTakenError(Exception):
    """Somebody else steers, and their connection is alive."""


class OperatorDesk:
    """The place of one operator. Thread-safe.

    A second person is refused while messages of the first arrive. After a silence a newcomer replaces the first, whose
    link may have died unnoticed.

    Args:
        alive_seconds: the seconds without a message after which an operator may be replaced.
    """

    def __init__(self, alive_seconds: float) -> None:
        self._alive_seconds = alive_seconds
        self._lock = threading.Lock()
        self._operator: object | None = None
        self._heard_at = 0.0
        self._pending: list[Controls] = []

    @property
    def operator(self) -> object | None:
        """The connection that steers; None: no one is connected."""
        return self._operator

    def sit(self, person: object, now: float) -> object | None:
        """Make a person the operator; return the person replaced, if any.

        Raises:
            DeskTakenError: somebody else steers.
        """
        with self._lock:
            if self._operator is not None and now - self._heard_at < self._alive_seconds:
                raise DeskTakenError
            replaced, self._operator, self._heard_at = self._operator, person, now
            return replaced

    def hear(self, person: object, controls: Controls, now: float) -> bool:
        """Process a person's message; return whether the person is the operator."""
        with self._lock:
            if person is not self._operator:
                return False
            self._heard_at = now
            pending = merged([*self._pending, controls])
            self._pending = [] if pending is None else [pending]
            return True

    def leave(self, person: object) -> None:
        """Free the place if this person holds it. Their earlier messages still count."""
        with self._lock:
            if person is self._operator:
                self._operator = None

    def take(self) -> tuple[Controls | None, bool]:
        """Return the operator's controls since the last call (None if none came), and whether one is connected."""
        with self._lock:
            pending, self._pending = self._pending, []
            return (pending[0] if pending else None), self._operator is not None


# Larger images cost milliseconds, and the page scales them down.
_LARGEST: Final = 640


class Shown(NamedTuple):
    """The content of the page at one moment.

    Attributes:
        number: the number of the set of images, which increases.
        views: the newest picture of each camera.
        state: the state of the episode, as sent.
    """

    number: int = 0
    views: tuple[CameraView, ...] = ()
    state: dict[str, Any] = {}  # noqa: RUF012 - a tuple's default, never changed


class Exhibit:
    """The newest images and state. Thread-safe.

    Args:
        wake: called after each change.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._shown = Shown()

    @property
    def newest(self) -> Shown:
        """The newest view."""
        return self._shown

    def show(self, views: Sequence[CameraView]) -> None:
        """Replace the pictures."""
        with self._lock:
            self._shown = self._shown._replace(number=self._shown.number + 1, views=tuple(views))
        self._wake()

    def tell(self, state: dict[str, Any]) -> None:
        """Replace the state of the episode."""
        with self._lock:
            changed, self._shown = state != self._shown.state, self._shown._replace(state=state)
        if changed:
            self._wake()


def jpeg(image: NDArray[np.uint8], quality: int) -> bytes:
    """Return an image [H, W, 3] as JPEG, scaled down if a side is longer than 640 pixels."""
    picture = Image.fromarray(image)
    picture.thumbnail((_LARGEST, _LARGEST))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def age_of(view: CameraView) -> float:
    """Return the seconds since a picture was taken."""
    return max(0.0, time.monotonic() - view.taken)
