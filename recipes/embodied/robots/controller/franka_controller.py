"""The controller of a real Franka arm, on the machine that is wired to it.

    python -m recipes.embodied.robots.controller.franka_controller --fci 172.16.0.2 --host 10.10.10.1

It speaks the protocol of `wire_protocol.py`, like the simulated controller, and moves the arm over its control
interface. Its interpreter needs `franka-rs`, but none of a job's other packages. There is no password: let it listen
only where nobody else can reach it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

from recipes.embodied.robots.controller.controller import Controller
from recipes.embodied.robots.controller.controller_server import controller_arguments, positive, serve
from recipes.embodied.robots.controller.fci_arm import ARMS, FciArm, FciOptions
from recipes.embodied.robots.robot_errors import RobotCheckError, RobotError, RobotUnreachableError
from rlinf_core.process.requirements import install_command

# The tested range of franka-rs: the first supported version, and the first unsupported one.
LIBRARY: Final = ((0, 4), (0, 5))
CONNECT_SECONDS: Final = 5.0


def connect_arm(address: str, options: FciOptions) -> FciArm:
    """Return the arm at an address, after checking the versions of library and arm. Moves nothing.

    Raises:
        RobotCheckError: franka-rs is missing, or the version of franka-rs or the arm is not supported.
        RobotUnreachableError: nothing answers at the address within `CONNECT_SECONDS`, or another client holds the arm.
    """
    where = f"FCI {address}"
    franka = _library(where)
    made: list[FciArm] = []
    failures: list[Exception] = []

    def open_robot() -> Any:
        robot = franka.Robot(address, realtime=options.realtime)
        if robot.fci_version not in ARMS:
            raise RobotCheckError(
                f"version {robot.fci_version} of the FCI was not tried",
                where=where,
                help=f"supported: {', '.join(f'{number} ({arm})' for number, arm in ARMS.items())}",
            )
        return robot

    def connect() -> None:
        try:
            made.append(FciArm(franka, open_robot, options))
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            failures.append(error)

    # The arm does not refuse a second client, but makes it wait until the first leaves.
    thread = threading.Thread(target=connect, name="rlinf-fci-connect", daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    if made:
        return made[0]
    if not failures:
        raise RobotUnreachableError(
            f"the arm did not answer within {CONNECT_SECONDS:g} s",
            where=where,
            why="another client of the FCI holds it; it serves one at a time",
            help="end the other client: a controller of rlinf, libfranka, franka_ros, or a process that was stopped",
        )
    error = failures[0]
    if not isinstance(error, franka.FrankaError):
        raise error
    raise RobotUnreachableError(
        "the arm cannot be connected",
        where=where,
        why=str(error),
        help="unlock the brakes and activate FCI in Desk, and check address and cable;"
        f" franka-rs {franka.__version__} speaks versions {', '.join(map(str, ARMS))} of the FCI."
        " `--realtime ignore` tries a kernel without real-time scheduling",
    )


def _library(where: str) -> Any:
    try:
        franka: Any = importlib.import_module("franka")
    except ImportError as error:
        raise RobotCheckError(
            "the controller of a real arm needs the package `franka-rs`",
            where=where,
            why=str(error),
            help=f"install the extra `rlinf-cli[franka]` for this interpreter: `{install_command('franka')}`",
        ) from error
    version = str(getattr(franka, "__version__", "unknown"))
    parts = tuple(int(part) for part in version.split(".") if part.isdigit())
    first, end = LIBRARY
    if not first <= parts < end:
        wanted = f"{'.'.join(map(str, first))} or later, before {'.'.join(map(str, end))}"
        raise RobotCheckError(
            f"franka-rs {version} was not tried", where=where, help=f"install a supported version: {wanted}"
        )
    return franka


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until interrupted; return the exit status."""
    standard = FciOptions()
    parser = controller_arguments((__doc__ or "").partition("\n")[0])
    parser.add_argument("--fci", required=True, metavar="ADDRESS", help="address of the arm's control unit")
    parser.add_argument(
        "--fraction",
        type=positive(1),
        default=standard.fraction,
        help=f"share of the arm's limits of velocity, acceleration and jerk (default: {standard.fraction:g})",
    )
    parser.add_argument(
        "--torque",
        type=positive(1000),
        default=standard.torque,
        help=f"collision threshold of each joint, in Nm (default: {standard.torque:g})",
    )
    parser.add_argument(
        "--force",
        type=positive(1000),
        default=standard.force,
        help=f"collision threshold of the hand, and force of a grasp, in N (default: {standard.force:g})",
    )
    parser.add_argument(
        "--realtime",
        choices=("enforce", "ignore"),
        default=standard.realtime,
        help="whether a kernel without real-time scheduling is refused (default: enforce)",
    )
    parser.add_argument(
        "--elbow",
        type=float,
        default=standard.elbow,
        help="smallest angle of joint 4, in radians; folded further, the arm may touch itself, which is a reflex"
        f" (default: {standard.elbow:g})",
    )
    parser.add_argument("--no-gripper", action="store_true", help="the arm has no Franka Hand")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    options = FciOptions(
        chosen.fraction, chosen.torque, chosen.force, chosen.realtime, not chosen.no_gripper, chosen.elbow
    )
    try:
        arm = connect_arm(chosen.fci, options)
    except RobotError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"connected to {arm.firmware}", file=sys.stderr, flush=True)
    try:
        return asyncio.run(serve(chosen.host, chosen.port, Controller(arm, workspace=chosen.workspace)))
    finally:
        arm.close()


if __name__ == "__main__":
    sys.exit(main())
