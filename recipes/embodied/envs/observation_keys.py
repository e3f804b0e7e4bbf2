"""The names of observations, and of policy inputs with the same content."""

from __future__ import annotations

from typing import Final

STATES: Final = "states"
INSTRUCTIONS: Final = "instructions"
# The only camera of an environment, or the one that shows the scene if there are several.
MAIN_CAMERA: Final = "main"
_IMAGES: Final = "images."
_PAST: Final = "past."


def image_key(camera: str = MAIN_CAMERA) -> str:
    """Return the name of a camera's images among observations and policy inputs."""
    return f"{_IMAGES}{camera}"


def camera_of(key: str) -> str | None:
    """Return the camera of an observation's name; None if it holds no images."""
    return key.removeprefix(_IMAGES) if key.startswith(_IMAGES) else None


def past_key(key: str) -> str:
    """Return the name of the earlier values of an observation, for policies that act on several in a row."""
    return f"{_PAST}{key}"


def is_past(key: str) -> bool:
    """Return whether an observation's name is one of `past_key`."""
    return key.startswith(_PAST)
