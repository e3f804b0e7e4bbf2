"""The checks before an arm moves: controller, link, limits, cameras, lease, workspace. They move nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from recipes.embodied.cameras.camera import CameraError
from recipes.embodied.cameras.camera_set import CameraSet
from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import CONTROL_SECONDS, is_within
from recipes.embodied.robots.franka_kinematics import HOME, JOINT_MAX, JOINT_MIN, VELOCITY_MAX, hand_pose
from recipes.embodied.robots.robot_errors import RobotCheckError
from recipes.embodied.robots.wire_protocol import ArmState, ControllerFacts
from rlinf_core.hardware.franka import Franka

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
