"""`rlinf robot`: commands for the operator of an arm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import File, Output, OutputOption, Quiet, Verbose, key_values
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.lazy import help_examples

if TYPE_CHECKING:
    from recipes.embodied.config.camera_config import RobotEnvOptions
    from recipes.embodied.robots.manual_control import Listed
    from rlinf_core.hardware.robots.franka import Franka

LIST_SCHEMA = "rlinf.robot-list/1"
CHECK_SCHEMA = "rlinf.robot-check/1"
CAMERAS_SCHEMA = "rlinf.robot-cameras/1"
DONE_SCHEMA = "rlinf.robot-done/1"

app = typer.Typer(
    help="List, check, look through, reset, move and stop the arms of a file, from the node that they are attached to.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    rich_help_panel="Robots",
)

Robot = Annotated[
    str | None,
    typer.Argument(metavar="[ROBOT]", help="Its address or its node's rank. Default: the only one."),
]


@app.command("list", epilog=help_examples("rlinf robot list robot.yaml"), no_args_is_help=True)
def list_(file: File, output: OutputOption = Output.TEXT, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """List the robots of FILE, their lease holders and their state."""
    from recipes.embodied.robots.manual_control import look

    listed, cameras = _opened(file)
    robots = look(listed, cameras)
    if output is Output.JSON:
        console.result_json({"schema": LIST_SCHEMA, "robots": robots})
        return
    columns = ("node", "type", "address", "controller", "holder", "state")
    rows = [
        (
            *("-" if robot[name] is None else str(robot[name]) for name in columns),
            ", ".join(robot["cameras"]) or "-",
        )
        for robot in robots
    ]
    if rows:
        heads = ("node", "type", "address", "controller", "held by", "state", "cameras")
        console.result(console.table(heads, rows, keep=(0, 2)))
    else:
        console.message("the file declares no robots")


@app.command("check", epilog=help_examples("rlinf robot check robot.yaml 10.10.10.1"), no_args_is_help=True)
def check(
    file: File,
    robot: Robot = None,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run the checks that a run makes before it moves an arm: controller, link, limits, workspace, cameras, lease.

    Nothing is moved. The exit status is 1 if a check fails.
    """
    from recipes.embodied.robots.manual_control import as_record
    from recipes.embodied.robots.manual_control import check as checks_of

    listed, cameras = _opened(file)
    checks = checks_of(_arm(listed, robot), cameras)
    if output is Output.JSON:
        console.result_json({"schema": CHECK_SCHEMA, "checks": as_record(checks)})
    else:
        rows = [(check.verdict, check.name, check.message, check.help or "") for check in checks]
        console.result(console.table(("", "check", "found", "do"), rows, keep=(0, 1)))
    if any(check.verdict == "fault" for check in checks):
        raise typer.Exit(ExitCode.FAILED)


@app.command("reset", epilog=help_examples("rlinf robot reset robot.yaml"), no_args_is_help=True)
def reset(
    file: File,
    robot: Robot = None,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Move an arm to its home position, and open its gripper. Refused while a job holds it."""
    from recipes.embodied.robots.manual_control import reset as reset_arm

    listed, cameras = _opened(file)
    arm = _arm(listed, robot)
    reset_arm(arm, cameras)
    _done(arm, "reset", "at home position", output)


@app.command(
    "teleop",
    epilog=help_examples(
        "rlinf robot teleop robot.yaml --device spacemouse",
        "rlinf robot teleop --to 127.0.0.1:17320 --token-file ~/.robot-token",
    ),
    no_args_is_help=True,
)
def teleop(
    file: Annotated[str | None, typer.Argument(metavar="FILE", hidden=True, autocompletion=completion.files)] = None,
    robot: Robot = None,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="keyboard, gamepad, spacemouse, browser, or your own.")
    ] = "keyboard",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="An option of the device. May be repeated."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="HOST:PORT",
            help="Instead steer a run with intervention source `remote`, from the keyboard.",
        ),
    ] = None,
    token_file: Annotated[
        str | None, typer.Option("--token-file", metavar="PATH", help="With --to: file of the shared token.")
    ] = None,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Teleoperate an arm from its current position. Refused while a job holds it."""
    if to is not None:
        _steer_remotely(to, token_file)
        return
    if file is None:
        raise typer.BadParameter("name a FILE, or a run with `--to HOST:PORT`")
    from recipes.embodied.interventions.devices.key_bindings import LEGEND
    from recipes.embodied.robots.manual_control import teleop as teleoperate

    listed, cameras = _opened(file)
    arm = _arm(listed, robot)
    if device == "keyboard":
        console.message(LEGEND)
    periods = teleoperate(arm, device, key_values(option), console.message, cameras)
    _done(arm, "teleop", f"it was moved for {periods} control periods", output)


@app.command("stop", epilog=help_examples("rlinf robot stop robot.yaml"), no_args_is_help=True)
def stop(
    file: File,
    robot: Robot = None,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Stop an arm at once, whoever holds it; a run that holds it ends with an error.

    This is not an emergency stop: that is a hardware button, which works without a computer.
    """
    from recipes.embodied.robots.manual_control import stop as stop_arm

    arm = _arm(_opened(file)[0], robot)
    stop_arm(arm)
    _done(arm, "stop", "stopped until reset", output)


@app.command(
    "cameras",
    epilog=help_examples("rlinf robot cameras robot.yaml", "rlinf robot cameras robot.yaml --save pictures"),
    no_args_is_help=True,
)
def cameras(
    file: File,
    robot: Robot = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FOLDER", help="Write a picture from each camera to this folder.")
    ] = None,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Look through the cameras of a robot's environment for a second: frames, sizes, ages. Nothing is moved."""
    from recipes.embodied.robots.manual_control import SECONDS, chosen_robot
    from recipes.embodied.robots.robot_cameras import look_through, save_pictures

    listed, options = _opened(file)
    if options is None or not options.cameras:
        console.message("the file declares no cameras: `env.train.options.cameras`")
        return
    states, views = look_through(chosen_robot(listed, robot), options, SECONDS)
    files = [] if save is None else save_pictures(save, views)
    if output is Output.JSON:
        seen = [state._asdict() for state in states]
        console.result_json({"schema": CAMERAS_SCHEMA, "cameras": seen, "pictures": [str(file) for file in files]})
        return
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
    console.result(console.table(("camera", "source", "device", "pixels", "frames/s", "newest frame"), rows, keep=(0,)))
    for picture in files:
        console.message(f"wrote {picture}")


def _arm(listed: list[Listed], robot: str | None) -> Franka:
    from recipes.embodied.robots.manual_control import chosen_arm

    return chosen_arm(listed, robot)


def _opened(file: str) -> tuple[list[Listed], RobotEnvOptions | None]:
    """Return the robots of a file, and the cameras of its environment, if it has one.

    Demonstrations that the file learns from may be about to be recorded, and packages of the job may be elsewhere: a
    person must be able to stop an arm.
    """
    from recipes.embodied.robots.manual_control import list_robots
    from recipes.embodied.rules.camera_rules import robot_options
    from rlinf_cli.file.job_file import load_sound

    job = load_sound(file, packages=False)
    env: Any = getattr(job.model, "env", None)
    return list_robots(job.cluster), None if env is None else robot_options(env.train)


def _done(arm: Franka, what: str, message: str, output: Output) -> None:
    address = f"{arm.robot_ip}:{arm.robot_port}"
    if output is Output.JSON:
        console.result_json({"schema": DONE_SCHEMA, "did": what, "address": address, "node": arm.node_rank})
    else:
        console.result(f"{address} of node {arm.node_rank}: {message}")


def _steer_remotely(address: str, token_file: str | None) -> None:
    from recipes.embodied.interventions.remote.remote_control import steer_remotely

    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise typer.BadParameter(f"`{address}` is not HOST:PORT")
    if token_file is None:
        raise typer.BadParameter("give `--token-file`, the file of the shared token")
    steer_remotely(host, int(port), token_file, console.message)
