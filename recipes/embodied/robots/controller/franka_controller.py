"""The controller of a real Franka arm, on the machine that is wired to it.

    python -m recipes.embodied.robots.controller.franka_controller --fci 172.16.0.2 --host 10.10.10.1

It speaks the protocol of `wire_protocol.py`, as the simulated controller does, and moves the arm over its control
interface. It needs `franka-rs` in its own interpreter, nothing else that jobs need. There is no password: let it listen
where only you can reach it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from recipes.embodied.robots.controller.controller import Controller
from recipes.embodied.robots.controller.controller_server import controller_arguments, positive, serve
from recipes.embodied.robots.controller.fci_arm import FciOptions, connect_arm
from recipes.embodied.robots.robot_errors import RobotError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until interrupted; returns the exit status."""
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
