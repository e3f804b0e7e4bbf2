"""Work with an arm by hand: list, check, reset, move, stop. `rlinf robot` calls these functions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.cameras.camera_set import CameraSet
from recipes.embodied.cameras.drivers import ArmScene, CameraView
from recipes.embodied.config.camera_config import RobotEnvOptions
from recipes.embodied.config.env_types import driver_of
from recipes.embodied.interventions.intervention import EnvProgress, HandMotion
from recipes.embodied.interventions.registry import open_source
from recipes.embodied.robots.controller_client import FrankaClient
from recipes.embodied.robots.franka_arm import CONTROL_SECONDS, HOME, steered
from recipes.embodied.robots.robot_errors import RobotError, RobotLateError, RobotUnreachableError
from recipes.embodied.robots.robot_session import (
    ArmCheck,
    check_arm,
    check_own_cameras,
    claimed_by,
    opened,
    refuse_faults,
    watch_cameras,
)
from recipes.embodied.robots.wire_protocol import ArmState
from rlinf_core import ConfigError, RLinfError, RobotUnit
from rlinf_core.hardware.franka import Franka
from rlinf_core.hardware.robots import PluginDrivenRobot
from rlinf_core.node.environment import process_environment

if TYPE_CHECKING:
    from rlinf_core.config.sections.cluster import ClusterConfig

# The time limit of a controller's answer to a person; a run is more patient.
SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Listed:
    """A robot that a job file declares.

    Attributes:
        group: label of its node group.
        type: the type of hardware.
        node: rank of its node.
        address: the address of its controller, as `HOST:PORT`; None: unknown.
        robot: the robot with its node's variables substituted, or as written if a variable is missing here.
        problem: why the address is unknown; None: it is known.
    """

    group: str
    type: str
    node: int
    address: str | None
    robot: RobotUnit
    problem: ConfigError | None = None

    @property
    def arm(self) -> Franka | None:
        """The arm; None for a robot with a custom driver."""
        return self.robot if isinstance(self.robot, Franka) else None


def list_robots(cluster: ClusterConfig) -> list[Listed]:
    """Return the robots that a file declares, in order, with the variables of this node."""
    listed: list[Listed] = []
    for group in cluster.node_groups:
        for written in group.hardware.configs if group.hardware else ():
            variables = process_environment(cluster, written.node_rank, group.label).variables
            unit, problem = written, None
            try:
                unit = written.on_node({**os.environ, **dict(variables)})
            except ConfigError as error:
                problem = error
            kind = group.hardware.type if group.hardware else ""
            listed.append(Listed(group.label, kind, unit.node_rank, _address_of(unit), unit, problem))
    return listed


def _address_of(unit: RobotUnit) -> str | None:
    if isinstance(unit, Franka):
        return f"{unit.robot_ip}:{unit.robot_port}"
    if isinstance(unit, PluginDrivenRobot):
        return unit.place
    return ", ".join(f"{host}:{port}" for host, port in unit.addresses()) or None


def chosen_arm(robots: Sequence[Listed], name: str | None) -> Franka:
    """Return the arm with the given node rank or address; without either, the only arm.

    Raises:
        RLinfError: no arm or several match.
    """
    arms = [robot.arm for robot in robots if robot.arm is not None and robot.problem is None]
    unknown = [robot.problem for robot in robots if robot.problem and name in (None, str(robot.node), robot.address)]
    if unknown and (name is not None or not arms):
        raise unknown[0]
    if name is not None:
        arms = [arm for arm in arms if name in (str(arm.node_rank), arm.robot_ip, f"{arm.robot_ip}:{arm.robot_port}")]
    if len(arms) == 1:
        return arms[0]
    known = ", ".join(f"{robot.address} of node {robot.node}" for robot in robots if robot.arm is not None)
    if not arms:
        others = sorted({robot.type for robot in robots if robot.arm is None})
        raise RLinfError(
            "the file has no such arm" if name else "the file has no arm that rlinf has a driver for",
            why=f"arms: {known}"
            if known
            else f"robots: {', '.join(others)}"
            if others
            else "the file declares no hardware",
            help="name a Franka by its address or the rank of its node, as `rlinf robot list` shows them",
        )
    raise RLinfError("several arms match", why=f"arms: {known}", help="name one by its address, `HOST:PORT`")


def chosen_robot(robots: Sequence[Listed], name: str | None) -> RobotUnit:
    """Return the robot, of any type, with the given node rank or address; without either, the only robot.

    Raises:
        RLinfError: no robot or several match.
    """
    matching = [robot for robot in robots if name in (None, str(robot.node), robot.address)]
    if len(matching) == 1:
        if matching[0].problem is not None:
            raise matching[0].problem
        return matching[0].robot
    known = ", ".join(f"{robot.address or robot.type} of node {robot.node}" for robot in robots) or "none"
    what = "several robots match" if matching else "the file has no such robot"
    raise RLinfError(what, why=f"robots: {known}", help="name one by its address or the rank of its node")


def look(robots: Sequence[Listed], options: RobotEnvOptions | None = None) -> list[dict[str, Any]]:
    """Return every robot with its controller's description, and the names of the cameras of its environment."""
    cameras = [] if options is None else list(options.cameras)
    return [{**_described(robot), **_answer(robot), "cameras": cameras} for robot in robots]


def _described(robot: Listed) -> dict[str, Any]:
    return {"group": robot.group, "type": robot.type, "node": robot.node, "address": robot.address}


def _answer(robot: Listed) -> dict[str, Any]:
    nothing = {"controller": None, "state": "its driver is a package of your own", "holder": None}
    if robot.problem is not None:
        return {**nothing, "state": robot.problem.message}
    driver = driver_of(robot.robot)
    if isinstance(robot.robot, PluginDrivenRobot) and driver is not None:
        return {**nothing, "controller": driver, "holder": claimed_by(robot.robot.place)}
    if robot.arm is None:
        return nothing
    try:
        with FrankaClient(robot.arm, seconds=SECONDS) as client:
            facts, state = client.facts(), client.state()
    except RobotError as error:
        return {**nothing, "state": error.why or error.message}
    stands = f"stopped: {state.stopped}" if state.stopped else "stands" if state.still_tick is not None else "moves"
    return {"controller": f"{facts.controller} {facts.version}", "state": stands, "holder": state.holder}


def check(arm: Franka, options: RobotEnvOptions | None = None) -> list[ArmCheck]:
    """Return all checks of an arm and of its environment's cameras, without motion and without the lease."""
    own = options is not None and bool(options.cameras)
    try:
        with FrankaClient(arm, seconds=SECONDS) as client:
            checks = check_arm(client, arm, _opened(arm, options))
        if options is not None and own:
            looked = check_own_cameras(arm, options, SECONDS)
            checks = [
                looked if result.verdict == "skipped" and result.name == "cameras" else result for result in checks
            ]
        return checks
    except RobotUnreachableError as error:
        return [ArmCheck("controller", "fault", f"{error.message}: {error.why}", error.help)]


def _opened(arm: Franka, options: RobotEnvOptions | None) -> list[str]:
    """Return serial numbers of the cameras that the environment reads instead of the controller."""
    return [] if options is None else [serial for serial in options.serials(arm.camera_serials).values() if serial]


def reset(arm: Franka, options: RobotEnvOptions | None = None) -> ArmState:
    """Move an arm to its home with an open gripper, which also ends a stop.

    Args:
        arm: the arm.
        options: the environment's cameras, which the controller does not read; None: no cameras.

    Raises:
        RobotLeaseError: a job holds the arm.
        RobotCheckError: a check has failed.
        RobotError: any other error of `FrankaClient`.
    """
    with _held(arm, _opened(arm, options)) as client:
        return client.reset(HOME)


def stop(arm: Franka) -> ArmState:
    """Stop an arm immediately, regardless of its holder.

    Raises:
        RobotUnreachableError: the controller does not answer.
    """
    with FrankaClient(arm, seconds=SECONDS) as client:
        return client.stop()


def teleop(
    arm: Franka,
    source: str,
    options: Mapping[str, Any],
    emit: Callable[[str], None],
    seen: RobotEnvOptions | None = None,
) -> int:
    """Let a person move an arm from its current pose until they press the key for success or failure, or Ctrl-C.

    Args:
        arm: the arm.
        source: an intervention source.
        options: the options of the device.
        emit: receives a line at the start and at the end.
        seen: the environment's cameras, shown to a person at a page; None: no cameras.

    Returns:
        The number of control periods in which the person moved the arm.

    Raises:
        RobotLeaseError: a job holds the arm.
        InterventionError: the device cannot be opened or was lost; the arm stops.
        RobotError: any other error of `FrankaClient`.
    """
    with ExitStack() as stack:
        client = stack.enter_context(_held(arm, _opened(arm, seen)))
        steered_arm = _SteeredArm(client.state())
        if seen is not None and seen.cameras:
            steered_arm.cameras = stack.enter_context(opened(arm, seen, lambda: steered_arm.scene))
        person = stack.enter_context(closing(open_source(source, steered_arm, options)))
        moved = 0
        try:
            # Ends a stop; the arm stays in place, and its gripper opens.
            steered_arm.see(client.reset(steered_arm.joints))
            emit(f"{client.where} follows the {source}; Ctrl-C ends")
            while True:
                command = person.read()
                if command is not None and command.verdicts:
                    return moved
                if command is None:
                    time.sleep(CONTROL_SECONDS)
                    state = client.state()
                else:
                    action = command.actions[0]
                    try:
                        state = client.move(action[:7] * steered_arm.scale, bool(action[7] > 0))
                        moved += 1
                    except RobotLateError as error:
                        emit(str(error))
                        state = client.state()
                watch_cameras(client, arm, state, steered_arm.cameras)
                steered_arm.see(state)
        except KeyboardInterrupt:
            return moved


def _held(arm: Franka, seen: Sequence[str] = ()) -> FrankaClient:
    """Return a client that holds the arm, after successful checks."""
    client = FrankaClient(arm, seconds=SECONDS)
    try:
        checks = [] if arm.disable_validate else check_arm(client, arm, seen)
        # `acquire` reports the holder; a hand outside the workspace may be led back in.
        refuse_faults(client, [result for result in checks if result.name not in ("lease", "workspace")])
        client.acquire()
    except BaseException:
        client.close()
        raise
    return client


class _SteeredArm:
    """Adapter of an arm for intervention sources: one environment whose actions are joints and gripper."""

    num_envs = 1
    action_size = 8
    control_hz = 1 / CONTROL_SECONDS
    paces_itself = True
    intervention = None

    def __init__(self, state: ArmState) -> None:
        from recipes.embodied.robots.franka_arm import ACTION_STEP

        self.cameras: CameraSet | None = None
        self.see(state)
        self.scale = ACTION_STEP[:, 0]
        self.progress = EnvProgress(np.zeros(1, np.int64), 0, np.zeros(1, np.int64), np.zeros(1, np.int64))

    def expert(self) -> None:
        return None

    def see(self, state: ArmState) -> None:
        self.state, self.joints = state, state.joints
        self.scene = ArmScene(state.joints, None, time.monotonic())

    def views(self, row: int) -> list[CameraView]:
        return [] if self.cameras is None else self.cameras.views()  # without cameras, a person stands beside the arm

    def steer(self, motion: HandMotion, row: int) -> NDArray[np.float32]:
        return steered(self.joints, motion, grips=True)

    def gripper_is_closed(self, row: int) -> bool:
        return self.state.gripper_closed

    def follow(self, joints: NDArray[np.float64], row: int) -> None:
        return None


def as_record(checks: Sequence[ArmCheck]) -> list[dict[str, Any]]:
    """Return checks in the form for JSON output."""
    return [asdict(result) for result in checks]
