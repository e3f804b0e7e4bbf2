"""Views of a simulated arm: where the point is, and that nothing is rendered twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes.util import find_library

import numpy as np
import pytest
from numpy.typing import NDArray

from recipes.embodied.cameras.camera import ArmScene, CameraSetup
from recipes.embodied.config.camera_config import CameraOptions
from recipes.embodied.envs.franka.pictures import SceneCamera
from recipes.embodied.robots.franka_kinematics import HOME

pytest.importorskip("mujoco")
needs_egl = pytest.mark.skipif(find_library("EGL") is None, reason="the system has no EGL")


def scene(y: float) -> ArmScene:
    return ArmScene(HOME, np.array([0.5, y, 0.2]), time.monotonic())


def camera(view: str, shown: Callable[[], ArmScene]) -> SceneCamera:
    options = CameraOptions.model_validate({"source": "scene", "view": view, "width": 64, "height": 48})
    return SceneCamera(CameraSetup("front", options, None, shown))


def greens(image: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the middle of the green pixels, as row and column, in shares of the picture."""
    red, green, blue = np.moveaxis(image.astype(int), -1, 0)
    rows, columns = np.nonzero((green > red + 60) & (green > blue + 60))
    return np.array([rows.mean() / image.shape[0], columns.mean() / image.shape[1]])


@needs_egl
@pytest.mark.parametrize(("view", "leftward"), [("front", 1), ("above", -1)])
def test_point_is_where_it_is_seen_from(view: str, leftward: int) -> None:
    shown = [scene(0.25)]
    eye = camera(view, lambda: shown[0])
    left = eye.read(1.0)
    shown[0] = scene(-0.25)
    right = eye.read(1.0)
    eye.close()
    assert left is not None
    assert right is not None
    assert left.image.shape == (48, 64, 3)
    # From the front, the arm's left is the picture's right.
    assert np.sign(greens(left.image)[1] - greens(right.image)[1]) == leftward
    assert (left.image != right.image).any()


def test_scene_is_rendered_once() -> None:
    shown = [scene(0.0)]
    eye = camera("drawing", lambda: shown[0])
    first, again = eye.read(1.0), eye.read(1.0)
    assert first is not None
    assert again is not None
    assert first.image is again.image
    assert first.taken == shown[0].measured
    shown[0] = scene(0.2)
    moved = eye.read(1.0)
    assert moved is not None
    assert (moved.image != first.image).any()
