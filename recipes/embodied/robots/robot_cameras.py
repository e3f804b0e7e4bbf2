"""The cameras of a file's robots, used by hand: view and measure them. `rlinf robot` calls these functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from recipes.embodied.cameras.camera import ArmScene, CameraError, CameraView
from recipes.embodied.cameras.camera_set import CameraSet, CameraState
from recipes.embodied.config.camera_config import RobotEnvOptions
from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.robot_session import ArmCheck
from rlinf_core import ConfigError, RLinfError, RobotUnit
from rlinf_core.foreign.files import write_fault
from rlinf_core.hardware.franka import Franka
from rlinf_core.hardware.robots import PluginDrivenRobot

# The time for counting frames, in seconds.
_WATCHED: Final = 1.0


@contextmanager
def opened(robot: RobotUnit, options: RobotEnvOptions, scene: Callable[[], ArmScene] | None) -> Generator[CameraSet]:
    """Open a robot's cameras, until the block ends.

    Raises:
        ConfigError: a package is missing, or a camera has no serial number or no driver.
        CameraError: a camera is missing, or gives no frame.
    """
    cameras = CameraSet(options, robot, place_of(robot), scene)
    try:
        yield cameras
    finally:
        cameras.close()


def place_of(robot: RobotUnit) -> str:
    """Return the robot and its address, in words."""
    if isinstance(robot, Franka):
        return f"Franka arm {robot.robot_ip}:{robot.robot_port} of node {robot.node_rank}"
    return f"{robot.place if isinstance(robot, PluginDrivenRobot) else 'robot'} of node {robot.node_rank}"


def scene_of(robot: RobotUnit, options: RobotEnvOptions, seconds: float) -> Callable[[], ArmScene] | None:
    """Return a constant scene of an arm, if one of its cameras renders it; the arm must not move meanwhile.

    Raises:
        RobotUnreachableError: the controller does not answer.
    """
    if not isinstance(robot, Franka):
        return None
    if not any(camera.source == "scene" for camera in options.cameras.values()):
        return None
    with FrankaClient(robot, seconds=seconds) as client:
        joints = client.state().joints
    return lambda: ArmScene(joints, None, time.monotonic())


def look_through(
    robot: RobotUnit, options: RobotEnvOptions, seconds: float
) -> tuple[list[CameraState], list[CameraView]]:
    """Return the states of a robot's cameras after a second of frames, and their images.

    Raises:
        ConfigError: a package is missing, or a camera has no serial number or no driver.
        CameraError: a camera is missing, or gives no frame.
        RobotUnreachableError: a camera renders the scene, and the controller does not answer.
    """
    with opened(robot, options, scene_of(robot, options, seconds)) as cameras:
        time.sleep(_WATCHED)
        return cameras.states(), cameras.views()


def check_own_cameras(robot: RobotUnit, options: RobotEnvOptions, seconds: float) -> ArmCheck:
    """Check whether each camera in the environment's options has a recent frame."""
    try:
        states, _ = look_through(robot, options, seconds)
    except (CameraError, ConfigError) as error:
        why = f": {error.why}" if error.why else ""
        return ArmCheck("cameras", "fault", f"{error.message}{why}", error.help)
    return ArmCheck("cameras", "ok", "; ".join(described(state) for state in states))


def described(state: CameraState) -> str:
    """Return a camera's state in words."""
    width, height = state.size
    return f"{state.name}: {width}x{height}, {state.rate:.0f} frames/s, newest {1000 * state.age:.0f} ms old"


def save_pictures(folder: Path, views: Sequence[CameraView]) -> list[Path]:
    """Write each image as `CAMERA.png`, and return the files.

    Raises:
        RLinfError: an image cannot be written.
    """
    from PIL import Image

    files: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for view in views:
            file = folder / f"{view.camera}.png"
            Image.fromarray(view.image).save(file)
            files.append(file)
    except OSError as error:
        raise RLinfError(
            "a picture cannot be written", where=str(folder), why=write_fault(folder, error), help="name another folder"
        ) from error
    return files
