"""A Franka controller with a simulated arm, to test everything but the hardware.

    python -m recipes.embodied.robots.controller.simulated_controller --host 127.0.0.1 --port 17310

It speaks the protocol of `wire_protocol.py` and moves as fast as a real arm; `--speed 50` makes it fifty times faster.
It runs until interrupted. Like the real one, it has no password: let it listen only where nobody else can reach it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from recipes.embodied.robots.controller.arm import SimulatedArm, SimulatedCameras
from recipes.embodied.robots.controller.controller import Controller
from recipes.embodied.robots.controller.controller_server import controller_arguments, positive, serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until interrupted; return the exit status."""
    parser = controller_arguments((__doc__ or "").partition("\n")[0])
    parser.add_argument("--speed", type=positive(1e6), default=1.0, help="times faster than a real arm (default: 1)")
    parser.add_argument(
        "--camera", action="append", default=[], metavar="SERIAL", help="a camera, by its serial number"
    )
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    controller = Controller(SimulatedArm(chosen.speed), SimulatedCameras(chosen.camera), chosen.workspace)
    return asyncio.run(serve(chosen.host, chosen.port, controller))


if __name__ == "__main__":
    sys.exit(main())
