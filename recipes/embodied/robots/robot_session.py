"""The checks before an arm moves: controller, link, limits, cameras, lease, workspace. Nothing is moved by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import CONTROL_SECONDS, is_within
from recipes.embodied.robots.franka_kinematics import HOME, JOINT_MAX, JOINT_MIN, VELOCITY_MAX, hand_pose
from recipes.embodied.robots.replies import ArmState, ControllerFacts
from recipes.embodied.robots.robot_errors import RobotCameraError, RobotCheckError
from rlinf_core.hardware.robots.franka import Franka

Verdict: TypeAlias = Literal["ok", "fault", "skipped"]
# Versions that were tried, by the name of the controller: the first that is supported, and the first that is not.
CONTROLLERS: Final = {"rlinf-simulated": ((2, 0), (3, 0))}
# Age of a camera's newest frame, in seconds, from which on it counts as frozen.
FRAME_AGE: Final = 0.5
_ROUNDS, _QUESTIONS = 3, 40  # of the measurement of the link
_TOLERANCE: Final = 1e-6  # radians


@dataclass(frozen=True, slots=True)
class ArmCheck:
    """One check of an arm.

    Attributes:
        name: what was looked at, in a word.
        verdict: how it ended.
        message: what was found.
        help: what to do about a fault; None: nothing.
    """

    name: str
    verdict: Verdict
    message: str
    help: str | None = None


def check_arm(client: FrankaClient, arm: Franka) -> list[ArmCheck]:
    """Return what can be found without the lease and without a motion.

    Raises:
        RobotLinkLostError: the controller does not answer.
    """
    facts, state = client.facts(), client.state()
    return [
        check_version(facts),
        check_latency([client.latency(_QUESTIONS) for _ in range(_ROUNDS)], facts.period),
        check_limits(facts),
        check_workspace(arm, state),
        check_cameras(arm, state),
        check_lease(facts),
    ]


def refuse_faults(client: FrankaClient, checks: list[ArmCheck]) -> None:
    """Do nothing where no check found a fault.

    Raises:
        RobotCheckError: one did; all faults are listed.
    """
    faults = [each for each in checks if each.verdict == "fault"]
    if faults:
        raise RobotCheckError(
            "the arm is not fit to move: " + "; ".join(f"{each.name}: {each.message}" for each in faults),
            where=client.where,
            help="; ".join(dict.fromkeys(each.help for each in faults if each.help))
            + "; `rlinf robot check` shows all checks",
        )


def check_version(facts: ControllerFacts) -> ArmCheck:
    """Judge the version of the controller by the table."""
    named = f"{facts.controller} {facts.version}" + (f", firmware {facts.firmware}" if facts.firmware else "")
    known = CONTROLLERS.get(facts.controller)
    if known is None:
        return ArmCheck("controller", "skipped", f"{named}: not in the table of controllers that were tried")
    try:
        version = tuple(int(part) for part in facts.version.split("."))
    except ValueError:
        version = ()
    first, end = known
    if first <= version < end:
        return ArmCheck("controller", "ok", named)
    wanted = f"{'.'.join(map(str, first))} or later, before {'.'.join(map(str, end))}"
    return ArmCheck("controller", "fault", f"{named}; supported: {wanted}", "install a version that is supported")


def check_latency(rounds: list[list[float]], period: float) -> ArmCheck:
    """Judge the link by the 99th percentile of the better of some rounds: a machine may be busy once."""
    best = min(float(np.quantile(each, 0.99)) for each in rounds)
    said = f"99 of 100 answers within {1000 * best:.1f} ms, the control period is {1000 * period:g} ms"
    if best <= period:
        return ArmCheck("link", "ok", said)
    help = "connect the node to the controller by a cable of its own, and end what loads either"
    return ArmCheck("link", "fault", said, help)


def check_limits(facts: ControllerFacts) -> ArmCheck:
    """Judge whether the controller keeps the limits of joints that are published for the arm."""
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
        message = f"a control period is {facts.period:g} s there and {CONTROL_SECONDS:g} s here"
        return ArmCheck("limits", "fault", message, "set the period of the controller")
    return ArmCheck("limits", "ok", "positions and velocities of joints are limited by the controller")


def check_workspace(arm: Franka, state: ArmState) -> ArmCheck:
    """Judge whether the hand is where it may be, now and at the arm's home, around which episodes start."""
    if arm.workspace is None:
        return ArmCheck("workspace", "skipped", "none is given for this arm; the controller's own holds")
    hand, home = (hand_pose(joints[:, None])[0][:, 0] for joints in (state.joints, HOME))
    low, high = arm.workspace
    said = f"the hand is at {np.round(hand, 3).tolist()} m"
    if not is_within(hand, arm.workspace):
        help = "lead the arm into its workspace by hand, or correct `workspace`"
        return ArmCheck("workspace", "fault", f"{said}, outside of {list(low)} to {list(high)}", help)
    if not is_within(home, arm.workspace):
        away = (
            f"at the arm's home the hand is at {np.round(home, 3).tolist()} m, outside of {list(low)} to {list(high)}"
        )
        return ArmCheck("workspace", "fault", away, "correct `workspace`: episodes start around the home")
    return ArmCheck("workspace", "ok", said)


def check_cameras(arm: Franka, state: ArmState) -> ArmCheck:
    """Judge whether each camera of the arm sees something now."""
    if not arm.camera_serials:
        return ArmCheck("cameras", "skipped", "none is declared")
    if arm.disable_validate:
        return ArmCheck("cameras", "skipped", "`disable_validate` is set")
    wrong = frozen(arm, state)
    if wrong:
        return ArmCheck("cameras", "fault", wrong, "plug the camera in again, and see that nothing else uses it")
    oldest = max(state.cameras[serial] for serial in arm.camera_serials)
    return ArmCheck("cameras", "ok", f"newest frames are at most {1000 * oldest:.0f} ms old")


def frozen(arm: Franka, state: ArmState) -> str | None:
    """Return what is wrong with the cameras of an arm; None: nothing."""
    for serial in arm.camera_serials:
        age = state.cameras.get(serial)
        if age is None:
            return f"camera {serial} is not there"
        if age > FRAME_AGE:
            return f"camera {serial} has taken no frame for {age:.1f} s"
    return None


def check_lease(facts: ControllerFacts) -> ArmCheck:
    """Judge whether somebody holds the arm."""
    if facts.holder is None:
        return ArmCheck("lease", "ok", "nobody holds the arm")
    return ArmCheck("lease", "fault", f"{facts.holder} holds the arm", "end that process, or wait until it is done")


def watch_cameras(client: FrankaClient, arm: Franka, state: ArmState) -> None:
    """Stop the arm where one of its cameras is frozen.

    Raises:
        RobotCameraError: one is.
    """
    if arm.disable_validate:
        return
    wrong = frozen(arm, state)
    if wrong:
        client.stop()
        raise RobotCameraError(
            f"{wrong}, and the arm was stopped",
            where=client.where,
            help="plug the camera in again, and see that nothing else uses it; then start again",
        )
