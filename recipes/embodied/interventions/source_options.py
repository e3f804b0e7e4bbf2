"""Options of the built-in intervention sources and judges. Validation needs no device library."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Count = Annotated[int, Field(ge=1)]
_Sign = Literal[-1, 1]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScriptedOptions(_Options):
    """Options of `scripted`: the environment's expert takes over at random moments.

    Attributes:
        probability: the probability of a takeover in each step in which the policy acts.
        shortest: fewest steps of a takeover.
        longest: most steps of a takeover.
        seed: the seed of the moments.
    """

    probability: Annotated[float, Field(ge=0, le=1)] = 0.05
    shortest: _Count = 5
    longest: _Count = 15
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _ordered(self) -> ScriptedOptions:
        if self.shortest > self.longest:
            raise ValueError(f"`shortest: {self.shortest}` exceeds `longest: {self.longest}`")
        return self


class PersonOptions(_Options):
    """Options of all devices of a person.

    Attributes:
        hz: steps in a second that a simulation is slowed down to, so that a person can follow; None: the environment's
            own rate, else 20. A real arm has its own pace.
        release_steps: steps without a motion after which the policy acts again.
        deadband: share of the largest deflection below which an axis counts as at rest.
        speed: factor of all motions, at most 1.
        signs: the signs of the six axes: forward, left, up, and about these; -1 turns one round.
    """

    hz: Annotated[float, Field(gt=0, le=1000)] | None = None
    release_steps: Annotated[int, Field(ge=0)] = 5
    deadband: Annotated[float, Field(ge=0, lt=1)] = 0.1
    speed: Annotated[float, Field(gt=0, le=1)] = 1.0
    signs: tuple[_Sign, _Sign, _Sign, _Sign, _Sign, _Sign] = (1, 1, 1, 1, 1, 1)


class KeyboardOptions(PersonOptions):
    """Options of `keyboard`.

    Attributes:
        device: file of the keyboard, as in `/dev/input/by-id/usb-ACME-event-kbd`, read by the package `evdev`; None:
            the terminal that the process was started from.
    """

    device: str | None = None


class GamepadOptions(PersonOptions):
    """Options of `gamepad`.

    Attributes:
        device: its file, as in `/dev/input/by-id/usb-ACME-event-joystick`; None: the only one there is.
    """

    device: str | None = None


class SpaceMouseOptions(PersonOptions):
    """Options of `spacemouse`.

    Attributes:
        serial: serial number of the device; None: the only one there is.
    """

    serial: str | None = None


class LeaderOptions(_Options):
    """Options of `leader`: a second SO-101 that a person moves by hand.

    Attributes:
        device: its serial port, as in `/dev/serial/by-id/usb-...`.
        calibration: a file of `lerobot-calibrate`; None: what its motors hold.
        align: degrees that no joint of the two arms may be apart by, and per cent for the gripper, when the person
            takes over; the arm would go there by itself.
        deadband: degrees, or per cent, below which a joint of the leader counts as at rest.
        release_steps: steps without a motion after which the policy acts again.
        hz: steps in a second that a simulation is slowed down to; None: the environment's own rate, else 20.
    """

    device: str
    calibration: str | None = None
    align: Annotated[float, Field(gt=0, le=360)] = 20.0
    deadband: Annotated[float, Field(gt=0, le=20)] = 1.0
    release_steps: Annotated[int, Field(ge=0)] = 20
    hz: Annotated[float, Field(gt=0, le=1000)] | None = None


class BrowserOptions(PersonOptions):
    """Options of `browser`: a person at a web page.

    Attributes:
        token_file: a file, readable by its owner alone, whose first line the page must send first.
        host: address to listen on.
        port: TCP port.
        hold_steps: steps without a message after which the arm stands still while the person is still in charge.
        lost_steps: steps without a message after which the run ends.
        picture_hz: most pictures of a camera that are sent in a second.
        quality: the quality of their JPEG compression, from 1 to 95.
    """

    token_file: str
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, lt=65536)] = 17321
    hold_steps: _Count = 4
    lost_steps: _Count = 200
    picture_hz: Annotated[float, Field(gt=0, le=60)] = 10.0
    quality: Annotated[int, Field(ge=1, le=95)] = 75


class KeysOptions(_Options):
    """Options of `keys`.

    Attributes:
        device: the device whose keys for success and failure count. A device that takes over in the same environment is
            asked instead.
        options: the options of that device.
    """

    device: Literal["keyboard", "gamepad", "browser"] = "keyboard"
    options: dict[str, Any] = Field(default_factory=dict[str, Any])


class ClassifierOptions(_Options):
    """Options of `classifier`.

    Attributes:
        path: run folder or checkpoint of `recipe=sft data.target=success`, on the node of the env workers.
        threshold: probability of success from which on a picture counts as one.
        in_a_row: pictures that must do so, one after the other.
    """

    path: str
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    in_a_row: _Count = 1
