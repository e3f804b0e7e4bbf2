"""`rlinf robot`: commands for the operator of an arm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import File, Output, OutputOption, Quiet, Verbose, key_values
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.lazy import help_examples

if TYPE_CHECKING:
    from recipes.embodied.robots.manual_control import Listed
    from rlinf_core.hardware.robots.franka import Franka

LIST_SCHEMA = "rlinf.robot-list/1"
CHECK_SCHEMA = "rlinf.robot-check/1"
DONE_SCHEMA = "rlinf.robot-done/1"

app = typer.Typer(
    help="List, check, reset, move and stop the arms of a file, from the node that they are attached to.",
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

    robots = look(_robots(file))
    if output is Output.JSON:
        console.result_json({"schema": LIST_SCHEMA, "robots": robots})
        return
    columns = ("node", "type", "address", "controller", "holder", "state")
    rows = [tuple("-" if robot[name] is None else str(robot[name]) for name in columns) for robot in robots]
    if rows:
        console.result(console.table(("node", "type", "address", "controller", "held by", "state"), rows, keep=(0, 2)))
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

    checks = checks_of(_arm(file, robot))
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

    arm = _arm(file, robot)
    reset_arm(arm)
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

    arm = _arm(file, robot)
    if device == "keyboard":
        console.message(LEGEND)
    periods = teleoperate(arm, device, key_values(option), console.message)
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

    arm = _arm(file, robot)
    stop_arm(arm)
    _done(arm, "stop", "stopped until reset", output)


def _arm(file: str, robot: str | None) -> Franka:
    from recipes.embodied.robots.manual_control import chosen_arm

    return chosen_arm(_robots(file), robot)


def _robots(file: str) -> list[Listed]:
    """Return the robots of a file; demonstrations that it learns from may be about to be recorded."""
    from recipes.embodied.robots.manual_control import list_robots
    from rlinf_cli.file.job_file import load_sound

    return list_robots(load_sound(file).cluster)


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
