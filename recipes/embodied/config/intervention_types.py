"""The tables of intervention sources and of judges, the only place that lists them. Imports no device library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

_FOLDER: Final = "recipes.embodied.interventions"
_OPTIONS: Final = f"{_FOLDER}.source_options"
NONE: Final = "none"
# No judge: rewards and successes come from the environment.
ENVIRONMENT: Final = "environment"


class SourceType(NamedTuple):
    """A built-in intervention source, or judge.

    Attributes:
        target: the subclass of `InterventionSource` or of `SuccessJudge`, as `package.module:Class`.
        options: the pydantic model of its options, as `package.module:Class`.
        modules: the modules that it requires.
        install: the packages of these modules, as named by pip.
        person: whether a person acts through it, so that it drives only one environment of a worker.
    """

    target: str
    options: str
    modules: tuple[str, ...] = ()
    install: str | None = None
    person: bool = True


def _source(name: str, kind: str, **fields: object) -> SourceType:
    target, options = f"{_FOLDER}.{name}:{kind}Source", f"{_OPTIONS}:{kind}Options"
    return SourceType(target, options, **fields)  # pyright: ignore[reportArgumentType]


SOURCES: Final[Mapping[str, SourceType]] = {
    "scripted": _source("scripted", "Scripted", person=False),
    "keyboard": _source("devices.keyboard", "Keyboard"),
    "gamepad": _source("devices.event_device", "Gamepad", modules=("evdev",), install="evdev"),
    "spacemouse": _source("devices.event_device", "SpaceMouse", modules=("hid",), install="hidapi"),
    "leader": SourceType(
        "recipes.embodied.robots.so101_bus:LeaderSource",
        f"{_OPTIONS}:LeaderOptions",
        modules=("lerobot",),
        install="lerobot[feetech]",
    ),
    "browser": _source(
        "browser.browser_source",
        "Browser",
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
    "keys": SourceType(f"{_FOLDER}.registry:KeysJudge", f"{_OPTIONS}:KeysOptions"),
    "classifier": SourceType(
        "recipes.embodied.using.success_classifier:ClassifierJudge", f"{_OPTIONS}:ClassifierOptions", modules=("torch",)
    ),
}
