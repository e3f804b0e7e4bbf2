"""Preparations of a motion: a robot's claim, the views of its cameras, and the checks of an arm. They move nothing.

A claim is a lock on a file of the node, which ends with the process, even after `kill -9`, so that no two jobs of a
node move the same robot. It is for robots whose controller grants no lease; the Franka arm's controller does.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import pwd
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias

import numpy as np

from recipes.embodied.cameras.camera_set import CameraSet, CameraState
from recipes.embodied.cameras.drivers import ArmScene, CameraError, CameraView
from recipes.embodied.config.camera_config import RobotEnvOptions
from recipes.embodied.robots.controller_client import FrankaClient, holder_name
from recipes.embodied.robots.franka_arm import (
    CONTROL_SECONDS,
    HOME,
    JOINT_MAX,
    JOINT_MIN,
    VELOCITY_MAX,
    hand_pose,
    is_within,
)
from recipes.embodied.robots.robot_errors import RobotCheckError, RobotLeaseError
from recipes.embodied.robots.wire_protocol import ArmState, ControllerFacts
from rlinf_core import ConfigError, RLinfError, RobotUnit
from rlinf_core.config.diagnostics import visible
from rlinf_core.foreign.files import write_fault
from rlinf_core.hardware.franka import Franka
from rlinf_core.hardware.robots import PluginDrivenRobot


class RobotClaim:
    """The right to move a robot, until `release` or the end of the process.

    Args:
        place: the robot's address on this node.

    Raises:
        RobotLeaseError: another process holds the claim.
    """

    def __init__(self, place: str) -> None:
        # All users can write to the folder: a link planted by another user must not redirect the write below.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = claim_file(place)
        try:
            self._descriptor = os.open(file, flags, 0o666)
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                os.close(self._descriptor)
                raise OSError(errno.EINVAL, "it is not a regular file")
        except OSError as error:
            holder = _owner(file)
            raise RobotLeaseError(
                "the robot cannot be claimed",
                holder=holder,
                where=place,
                why=f"`{file}`, created by {holder or 'another user'}, cannot be used: {error.strerror}",
                help=f"ask {holder or 'its owner'} to end the process that moves the robot, and to remove the file",
            ) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = visible(os.pread(self._descriptor, 1000, 0).decode("utf-8", "replace").strip()) or None
            os.close(self._descriptor)
            raise RobotLeaseError(
                "the robot is in use",
                holder=holder,
                where=place,
                why=f"{holder or 'another process'} controls it",
                help="end that process, or wait until it is done; give each env worker its own robot",
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, holder_name().encode(), 0)

    def release(self) -> None:
        """Release the robot. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _owner(file: Path) -> str | None:
    """Return the owner of a file, as text; None if unknown."""
    try:
        return f"user {pwd.getpwuid(file.lstat().st_uid).pw_name}"
    except (OSError, KeyError):
        return None


def claim_file(place: str) -> Path:
    """Return the file whose lock is the claim on a robot."""
    digest = hashlib.sha256(os.path.realpath(place).encode() if place.startswith("/") else place.encode()).hexdigest()
    return Path(tempfile.gettempdir()) / f"rlinf-robot-{digest[:16]}.claim"


def claimed_by(place: str) -> str | None:
    """Return the holder of a robot, as text; None if it is free."""
    try:
        with RobotClaim(place):
            return None
    except RobotLeaseError as error:
        return error.holder or "another process"


Verdict: TypeAlias = Literal["ok", "fault", "skipped"]
# Tested versions by the name of the controller: the first supported version, and the first unsupported one.
CONTROLLERS: Final = {"rlinf-simulated": ((3, 0), (4, 0)), "rlinf-franka": ((3, 0), (4, 0))}
# The age of a camera's newest frame, in seconds, from which it counts as frozen.
FRAME_AGE: Final = 0.5
_ROUNDS, _QUESTIONS = 3, 40  # of the measurement of the link
_TOLERANCE: Final = 1e-6  # radians


@dataclass(frozen=True, slots=True)
class ArmCheck:
    """One check of an arm.

    Attributes:
        name: the subject of the check, in a word.
        verdict: the result.
        message: the finding.
        help: the remedy for a fault; None: no fault.
    """

    name: str
    verdict: Verdict
    message: str
    help: str | None = None


def check_arm(client: FrankaClient, arm: Franka, opened: Collection[str] = ()) -> list[ArmCheck]:
    """Return the checks that need neither the lease nor a motion.

    Args:
        client: the connection to the controller.
        arm: the arm.
        opened: serial numbers of the cameras that this process reads itself; the controller is asked for the others.

    Raises:
        RobotLinkLostError: the controller does not answer.
    """
    facts, state = client.facts(), client.state()
    return [
        check_version(facts),
        check_latency([client.latency(_QUESTIONS) for _ in range(_ROUNDS)], facts.period),
        check_limits(facts),
        check_workspace(arm, state),
        check_cameras(arm, state, opened),
        check_lease(facts),
    ]


def refuse_faults(client: FrankaClient, checks: list[ArmCheck]) -> None:
    """Do nothing if no check found a fault.

    Raises:
        RobotCheckError: a check found a fault; all faults are listed.
    """
    faults = [check for check in checks if check.verdict == "fault"]
    if faults:
        raise RobotCheckError(
            "the arm is not ready to move: " + "; ".join(f"{fault.name}: {fault.message}" for fault in faults),
            where=client.where,
            help="; ".join(dict.fromkeys(fault.help for fault in faults if fault.help))
            + "; `rlinf robot check` shows all checks",
        )


def check_version(facts: ControllerFacts) -> ArmCheck:
    """Check the version of the controller against `CONTROLLERS`."""
    named = f"{facts.controller} {facts.version}" + (f", firmware {facts.firmware}" if facts.firmware else "")
    versions = CONTROLLERS.get(facts.controller)
    if versions is None:
        return ArmCheck("controller", "skipped", f"{named}: not in the table of tested controllers")
    try:
        version = tuple(int(part) for part in facts.version.split("."))
    except ValueError:
        version = ()
    first, end = versions
    if first <= version < end:
        return ArmCheck("controller", "ok", named)
    wanted = f"{'.'.join(map(str, first))} or later, before {'.'.join(map(str, end))}"
    return ArmCheck("controller", "fault", f"{named}; supported: {wanted}", "install a supported version")


def check_latency(rounds: list[list[float]], period: float) -> ArmCheck:
    """Check the link by the 99th percentile of its best round, since a machine may be briefly busy."""
    best = min(float(np.quantile(latencies, 0.99)) for latencies in rounds)
    measured = f"99 of 100 responses within {1000 * best:.1f} ms; the control period is {1000 * period:g} ms"
    if best <= period:
        return ArmCheck("link", "ok", measured)
    help = "connect the node to the controller with a dedicated cable, and end what loads either"
    return ArmCheck("link", "fault", measured, help)


def check_limits(facts: ControllerFacts) -> ArmCheck:
    """Check that the controller's joint limits are within the arm's published ones."""
    wider = [
        name
        for name, theirs, ours, sign in (
            ("velocities", facts.velocity, VELOCITY_MAX, 1),
            ("lower positions", facts.low, JOINT_MIN, -1),
            ("upper positions", facts.high, JOINT_MAX, 1),
        )
        if (sign * (np.array(theirs) - ours) > _TOLERANCE).any()
    ]
    if wider:
        message = f"the controller allows more than the arm can do: {', '.join(wider)}"
        return ArmCheck("limits", "fault", message, "set the limits of the arm's data sheet in the controller")
    if abs(facts.period - CONTROL_SECONDS) > _TOLERANCE:
        message = f"the controller's control period is {facts.period:g} s, ours is {CONTROL_SECONDS:g} s"
        return ArmCheck("limits", "fault", message, "set the period of the controller")
    return ArmCheck("limits", "ok", "positions and velocities of joints are limited by the controller")


def check_workspace(arm: Franka, state: ArmState) -> ArmCheck:
    """Check that the hand is in its workspace, now and at the arm's home, around which episodes start."""
    if arm.workspace is None:
        return ArmCheck("workspace", "skipped", "none is set for this arm; the controller's own applies")
    hand, home = (hand_pose(joints[:, None])[0][:, 0] for joints in (state.joints, HOME))
    low, high = arm.workspace
    outside = f"outside of {list(low)} to {list(high)}"
    position = f"the hand is at {np.round(hand, 3).tolist()} m"
    if not is_within(hand, arm.workspace):
        help = "guide the arm into its workspace by hand, or correct `workspace`"
        return ArmCheck("workspace", "fault", f"{position}, {outside}", help)
    if not is_within(home, arm.workspace):
        away = f"at the arm's home the hand is at {np.round(home, 3).tolist()} m, {outside}"
        return ArmCheck("workspace", "fault", away, "correct `workspace`: episodes start around the home")
    return ArmCheck("workspace", "ok", position)


def check_cameras(arm: Franka, state: ArmState, opened: Collection[str] = ()) -> ArmCheck:
    """Check that each camera that the controller reads has a recent frame."""
    watched = [serial for serial in arm.camera_serials if serial not in opened]
    if not watched:
        return ArmCheck("cameras", "skipped", "the controller reads none")
    if arm.disable_validate:
        return ArmCheck("cameras", "skipped", "`disable_validate` is set")
    wrong = frozen(watched, state)
    if wrong:
        return ArmCheck("cameras", "fault", wrong, "reconnect the camera, and check that nothing else uses it")
    oldest = max(state.cameras[serial] for serial in watched)
    return ArmCheck("cameras", "ok", f"newest frames are at most {1000 * oldest:.0f} ms old")


def frozen(serials: Collection[str], state: ArmState) -> str | None:
    """Return the fault of cameras that the controller reads; None if they are fine."""
    for serial in serials:
        age = state.cameras.get(serial)
        if age is None:
            return f"camera {serial} is not connected"
        if age > FRAME_AGE:
            return f"camera {serial} has taken no frame for {age:.1f} s"
    return None


def check_lease(facts: ControllerFacts) -> ArmCheck:
    """Check whether somebody holds the arm."""
    if facts.holder is None:
        return ArmCheck("lease", "ok", "the arm is free")
    return ArmCheck("lease", "fault", f"{facts.holder} holds the arm", "end that process, or wait until it is done")


def watch_cameras(client: FrankaClient, arm: Franka, state: ArmState, cameras: CameraSet | None = None) -> None:
    """Stop the arm if a camera is frozen, among `cameras` or those that the controller reads.

    Raises:
        CameraError: a camera is frozen.
    """
    try:
        if cameras is not None:
            cameras.watch()
        if arm.disable_validate:
            return
        opened = () if cameras is None else cameras.serials.values()
        wrong = frozen([serial for serial in arm.camera_serials if serial not in opened], state)
        if wrong:
            help = "reconnect the camera, and check that nothing else uses it; then start again"
            raise CameraError(wrong, where=client.where, help=help)
    except CameraError as error:
        client.stop()
        raise error.after_stop() from error


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
