"""The tables of intervention sources and of judges, the only place that lists them, and their options.

Imports no device library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field, model_validator

from rlinf_core import ConfigModel, Count
from rlinf_core.scalars import Data, Float, Int, Text, problem

_Sign = Literal[-1, 1]


class ScriptedOptions(ConfigModel):
    """Options of `scripted`: the environment's expert takes over at random moments."""

    probability: Annotated[Float, Field(ge=0, le=1)] = Field(
        default=0.05, description="The probability of a takeover in each step in which the policy acts."
    )
    shortest: Count = Field(default=5, description="Fewest steps of a takeover.")
    longest: Count = Field(default=15, description="Most steps of a takeover.")
    seed: Annotated[Int, Field(ge=0)] = Field(default=0, description="The seed of the moments.")

    @model_validator(mode="after")
    def _ordered(self) -> ScriptedOptions:
        if self.shortest > self.longest:
            raise problem("bad-value", f"`shortest: {self.shortest}` exceeds `longest: {self.longest}`")
        return self


class PersonOptions(ConfigModel):
    """Options of all devices of a person."""

    hz: Annotated[Float, Field(gt=0, le=1000)] | None = Field(
        default=None,
        description="Steps per second that a simulation is slowed down to, so that a person can follow; null: the"
        " environment's own rate, else 20. A real arm has its own pace.",
    )
    release_steps: Annotated[Int, Field(ge=0)] = Field(
        default=5, description="Steps without a motion after which the policy acts again."
    )
    deadband: Annotated[Float, Field(ge=0, lt=1)] = Field(
        default=0.1, description="Share of the largest deflection below which an axis counts as at rest."
    )
    speed: Annotated[Float, Field(gt=0, le=1)] = Field(default=1.0, description="Factor of all motions, at most 1.")
    signs: tuple[_Sign, _Sign, _Sign, _Sign, _Sign, _Sign] = Field(
        default=(1, 1, 1, 1, 1, 1),
        description="The signs of the six axes: forward, left, up, and about these; -1 turns one round.",
    )


class KeyboardOptions(PersonOptions):
    """Options of `keyboard`."""

    device: Text | None = Field(
        default=None,
        description="File of the keyboard, as in `/dev/input/by-id/usb-ACME-event-kbd`, read by the package `evdev`;"
        " null: the terminal that the process was started from.",
    )


class GamepadOptions(PersonOptions):
    """Options of `gamepad`."""

    device: Text | None = Field(
        default=None,
        description="Its file, as in `/dev/input/by-id/usb-ACME-event-joystick`; null: the only one there is.",
    )


class SpaceMouseOptions(PersonOptions):
    """Options of `spacemouse`."""

    serial: Text | None = Field(default=None, description="Serial number of the device; null: the only one there is.")


class LeaderOptions(ConfigModel):
    """Options of `leader`: a second SO-101 that a person moves by hand."""

    device: Text = Field(description="Its serial port, as in `/dev/serial/by-id/usb-...`.")
    calibration: Text | None = Field(
        default=None, description="A file of `lerobot-calibrate`; null: what its motors hold."
    )
    align: Annotated[Float, Field(gt=0, le=360)] = Field(
        default=20.0,
        description="Degrees that no joint of the two arms may be apart by, and per cent for the gripper, when the"
        " person takes over; the arm would go there by itself.",
    )
    deadband: Annotated[Float, Field(gt=0, le=20)] = Field(
        default=1.0, description="Degrees, or per cent, below which a joint of the leader counts as at rest."
    )
    release_steps: Annotated[Int, Field(ge=0)] = Field(
        default=20, description="Steps without a motion after which the policy acts again."
    )
    hz: Annotated[Float, Field(gt=0, le=1000)] | None = Field(
        default=None,
        description="Steps per second that a simulation is slowed down to; null: the environment's own rate, else 20.",
    )


class BrowserOptions(PersonOptions):
    """Options of `browser`: a person at a web page."""

    token_file: Text = Field(
        description="A file, readable by its owner alone, whose first line the page must send first."
    )
    host: Text = Field(default="127.0.0.1", description="Address to listen on.")
    port: Annotated[Int, Field(ge=0, lt=65536)] = Field(default=17321, description="TCP port.")
    hold_steps: Count = Field(
        default=4,
        description="Steps without a message after which the arm stands still while the person is still in charge.",
    )
    lost_steps: Count = Field(default=200, description="Steps without a message after which the run ends.")
    picture_hz: Annotated[Float, Field(gt=0, le=60)] = Field(
        default=10.0, description="Most images of a camera that are sent per second."
    )
    quality: Annotated[Int, Field(ge=1, le=95)] = Field(
        default=75, description="The quality of their JPEG compression, from 1 to 95."
    )


class KeysOptions(ConfigModel):
    """Options of `keys`."""

    device: Literal["keyboard", "gamepad", "browser"] = Field(
        default="keyboard",
        description="The device whose keys for success and failure count. A device that takes over in the same"
        " environment is asked instead.",
    )
    options: dict[str, Data] = Field(default_factory=dict[str, Any], description="The options of that device.")


class ClassifierOptions(ConfigModel):
    """Options of `classifier`."""

    path: Text = Field(
        description="Run folder or checkpoint of `recipe=sft data.target=success`, on the node of the env workers."
    )
    threshold: Annotated[Float, Field(gt=0, lt=1)] = Field(
        default=0.5, description="Probability of success from which on a picture counts as one."
    )
    in_a_row: Count = Field(default=1, description="Pictures that must do so, one after the other.")


_FOLDER: Final = "recipes.embodied.interventions"
NONE: Final = "none"
# No judge: rewards and successes come from the environment.
ENVIRONMENT: Final = "environment"


class SourceType(NamedTuple):
    """A built-in intervention source, or judge.

    Attributes:
        target: the subclass of `InterventionSource` or of `SuccessJudge`, as `package.module:Class`.
        options: the model of its options.
        modules: the modules that it requires.
        install: the packages of these modules, as named by pip.
        person: whether a person acts through it, so that it drives only one environment of a worker.
    """

    target: str
    options: type[ConfigModel]
    modules: tuple[str, ...] = ()
    install: str | None = None
    person: bool = True


SOURCES: Final[Mapping[str, SourceType]] = {
    "scripted": SourceType(f"{_FOLDER}.registry:ScriptedSource", ScriptedOptions, person=False),
    "keyboard": SourceType(f"{_FOLDER}.keyboard:KeyboardSource", KeyboardOptions),
    "gamepad": SourceType(f"{_FOLDER}.event_device:GamepadSource", GamepadOptions, modules=("evdev",), install="evdev"),
    "spacemouse": SourceType(
        f"{_FOLDER}.event_device:SpaceMouseSource", SpaceMouseOptions, modules=("hid",), install="hidapi"
    ),
    "leader": SourceType(
        "recipes.embodied.envs.real.so101:LeaderSource",
        LeaderOptions,
        modules=("lerobot",),
        install="lerobot[feetech]",
    ),
    "browser": SourceType(
        f"{_FOLDER}.browser_source:BrowserSource",
        BrowserOptions,
        modules=("starlette", "uvicorn", "websockets", "PIL"),
        install="rlinf-cli[browser]",
    ),
}

# Former sources, each with advice on what to write instead.
FORMER_SOURCES: Final[Mapping[str, str]] = {
    "remote": "write `source: browser`, a page that is steered by the keyboard, too; its `port` is 17321",
}


def drives_one(name: str) -> bool:
    """Return whether a source can drive only one environment of a worker, because a person acts through it."""
    return name in SOURCES and SOURCES[name].person


JUDGES: Final[Mapping[str, SourceType]] = {
    "keys": SourceType(f"{_FOLDER}.registry:KeysJudge", KeysOptions),
    "classifier": SourceType(
        "recipes.embodied.using.success_classifier:ClassifierJudge", ClassifierOptions, modules=("torch",)
    ),
}
