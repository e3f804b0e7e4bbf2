"""`rlinf robot`: commands for the operator of an arm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rlinf_cli import console
from rlinf_cli.command import Result, arg, command, group, key_values, opt
from rlinf_cli.interrupts import ExitCode
from rlinf_cli.options import File

if TYPE_CHECKING:
    from recipes.embodied.config.camera_config import RobotEnvOptions
    from recipes.embodied.robots.manual_control import Listed
    from rlinf_core.hardware.franka import Franka

LIST_SCHEMA = "rlinf.robot-list/1"
CHECK_SCHEMA = "rlinf.robot-check/1"
CAMERAS_SCHEMA = "rlinf.robot-cameras/1"
DONE_SCHEMA = "rlinf.robot-done/1"

app = group("List, check, move and stop the arms of a file, from their node.", heading="Robots")

# Its address or its node's rank; by default the only one.
Robot = Annotated[str | None, arg("ROBOT")]


@command("rlinf robot list robot.yaml", app=app, name="list")
def list_(file: File) -> Result:
    """List the robots of FILE, their lease holders and their state."""
    from recipes.embodied.robots.manual_control import look

    listed, cameras = _opened(file)
    robots = look(listed, cameras)
    columns = ("node", "type", "address", "controller", "holder", "state")
    rows = [
        (
            *("-" if robot[name] is None else str(robot[name]) for name in columns),
            ", ".join(robot["cameras"]) or "-",
        )
        for robot in robots
    ]
    heads = ("node", "type", "address", "controller", "held by", "state", "cameras")
    return Result(
        lambda: console.table(heads, rows, keep=(0, 2)) if rows else "",
        {"schema": LIST_SCHEMA, "robots": robots},
        notes=() if rows else ("the file declares no robots",),
    )


@command("rlinf robot check robot.yaml 10.10.10.1", app=app)
def check(
    file: File,
    robot: Robot = None,
) -> Result:
    """Run the checks that a run makes before it moves an arm.

    Those of its controller, link, limits, workspace, cameras and lease. Nothing is moved. The exit status is 1 if a
    check fails.
    """
    from recipes.embodied.robots.manual_control import as_record
    from recipes.embodied.robots.manual_control import check as checks_of

    listed, cameras = _opened(file)
    checks = checks_of(_arm(listed, robot), cameras)
    rows = [(check.verdict, check.name, check.message, check.help or "") for check in checks]
    return Result(
        lambda: console.table(("", "check", "found", "do"), rows, keep=(0, 1)),
        {"schema": CHECK_SCHEMA, "checks": as_record(checks)},
        ExitCode.FAILED if any(check.verdict == "fault" for check in checks) else ExitCode.OK,
    )


@command("rlinf robot reset robot.yaml", app=app)
def reset(
    file: File,
    robot: Robot = None,
) -> Result:
    """Move an arm to its home position, and open its gripper.

    It is refused while a job holds the arm. ROBOT is its address or its node's rank; by default the only one.
    """
    from recipes.embodied.robots.manual_control import reset as reset_arm

    listed, cameras = _opened(file)
    arm = _arm(listed, robot)
    reset_arm(arm, cameras)
    return _done(arm, "reset", "at home position")


@command("rlinf robot teleop robot.yaml --device spacemouse", app=app)
def teleop(
    file: File,
    robot: Robot = None,
    device: Annotated[str, opt("--device NAME", "keyboard, gamepad, spacemouse, browser, or your own.")] = "keyboard",
    option: Annotated[list[str] | None, opt("--option KEY=VALUE", "An option of the device. May be repeated.")] = None,
) -> Result:
    """Teleoperate an arm from its current position.

    It is refused while a job holds the arm.
    """
    from recipes.embodied.interventions.keyboard import LEGEND
    from recipes.embodied.robots.manual_control import teleop as teleoperate

    listed, cameras = _opened(file)
    arm = _arm(listed, robot)
    if device == "keyboard":
        console.message(LEGEND)
    periods = teleoperate(arm, device, key_values(option), console.message, cameras)
    return _done(arm, "teleop", f"it was moved for {periods} control periods")


@command("rlinf robot stop robot.yaml", app=app)
def stop(
    file: File,
    robot: Robot = None,
) -> Result:
    """Stop an arm at once, whoever holds it.

    A run that holds it ends with an error. This is not an emergency stop: that is a hardware button, which works
    without a computer.
    """
    from recipes.embodied.robots.manual_control import stop as stop_arm

    arm = _arm(_opened(file)[0], robot)
    stop_arm(arm)
    return _done(arm, "stop", "stopped until reset")


@command("rlinf robot cameras robot.yaml", "rlinf robot cameras robot.yaml -o pictures", app=app)
def cameras(
    file: File,
    robot: Robot = None,
    save: Annotated[Path | None, opt("-o FOLDER", "Write a picture from each camera to this folder.")] = None,
) -> Result:
    """Look through the cameras of an environment for a second.

    Their frames, sizes and ages are listed. Nothing is moved.
    """
    from recipes.embodied.robots.manual_control import SECONDS, chosen_robot
    from recipes.embodied.robots.robot_session import look_through, save_pictures

    listed, options = _opened(file)
    if options is None or not options.cameras:
        return Result(notes=("the file declares no cameras: `env.train.options.cameras`",))
    states, views = look_through(chosen_robot(listed, robot), options, SECONDS)
    files = [] if save is None else save_pictures(save, views)
    rows = [
        (
            state.name,
            state.source,
            state.serial or "-",
            f"{state.size[0]}x{state.size[1]}",
            f"{state.rate:.0f}",
            f"{1000 * state.age:.0f} ms",
        )
        for state in states
    ]
    heads = ("camera", "source", "device", "pixels", "frames/s", "newest frame")
    seen = [state._asdict() for state in states]
    return Result(
        lambda: console.table(heads, rows, keep=(0,)),
        {"schema": CAMERAS_SCHEMA, "cameras": seen, "pictures": [str(file) for file in files]},
        notes=tuple(f"wrote {picture}" for picture in files),
    )


def _arm(listed: list[Listed], robot: str | None) -> Franka:
    from recipes.embodied.robots.manual_control import chosen_arm

    return chosen_arm(listed, robot)


def _opened(file: str) -> tuple[list[Listed], RobotEnvOptions | None]:
    """Return the robots of a file, and the cameras of its environment, if it has one.

    Demonstrations that the file learns from may be about to be recorded, and packages of the job may be elsewhere: a
    person must be able to stop an arm.
    """
    from recipes.embodied.robots.manual_control import list_robots
    from recipes.embodied.rules.robot_rules import robot_options
    from rlinf_cli.job.job_file import load_sound

    job = load_sound(file, packages=False)
    env: Any = getattr(job.model, "env", None)
    return list_robots(job.cluster), None if env is None else robot_options(env.train)


def _done(arm: Franka, what: str, message: str) -> Result:
    address = f"{arm.robot_ip}:{arm.robot_port}"
    record = {"schema": DONE_SCHEMA, "did": what, "address": address, "node": arm.node_rank}
    return Result(f"{address} of node {arm.node_rank}: {message}", record)
