"""As much of franka-rs as the controller uses: an arm that follows its target at once, in time that a test counts."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from recipes.embodied.robots.franka_arm import HOME


class FrankaError(Exception):
    """Any error of the library; `kind` is `network` where a connection failed."""

    kind = "control"


class NetworkError(FrankaError):
    """The error of a broken connection, which is a `FrankaError` in the library."""

    kind = "network"


class ControlException(FrankaError):  # noqa: N818 - its name in the library
    """A motion that the arm ended."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__(f"motion aborted by reflex! {errors}")
        self.errors = errors


class Loop:
    """A loop of targets.

    Attributes:
        reflexes: names of the errors that ended it.
        held: somebody holds the arm where it is.
    """

    def __init__(self, robot: Robot) -> None:
        self.robot, self.running = robot, True
        self.reflexes: list[str] = []
        self.goal = robot.q.copy()

    def target(self) -> Any:
        return self.goal.copy()

    def state(self) -> Any:
        return self.robot.read_once()

    def move_to(self, goal: Any) -> None:
        if not self.running:
            raise FrankaError("the loop ended")
        self.goal = np.array(goal)
        if not self.robot.held:
            self.robot.q = self.goal.copy()

    def follow(self, chunk: Any, dt: float) -> None:
        self.robot.ways.append((np.array(chunk), dt))
        self.move_to(chunk[-1])

    def stop(self) -> None:
        self.running = False
        if self.reflexes:
            raise ControlException(self.reflexes)

    def reflex(self, *errors: str) -> None:
        self.running, self.reflexes = False, list(errors)
        self.robot.mode = "reflex"


class Hand:
    """A gripper that does what it is told, unless it is broken."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.broken = False

    def grasp(self, width: float, speed: float, force: float, epsilon_inner: float, epsilon_outer: float) -> bool:
        if self.broken:
            raise FrankaError("the hand does not answer")
        self.did.append(f"grasp {force:g}")
        return False

    def move(self, width: float, speed: float) -> bool:
        self.did.append(f"open {width:g}")
        return True

    def read_once(self) -> Any:
        return SimpleNamespace(max_width=0.0795)


class Robot:
    """A connection, of which the newest is `made`.

    Attributes:
        busy: set where another client holds the arm: connecting waits for it to be cleared.
        gone: nothing answers on this connection any more.
        broken: requests cannot be sent any more; states arrive.
        refuses: requests are refused.
        time: of the arm's clock, in seconds; it stands still.
    """

    made: Robot
    busy: threading.Event | None = None
    version = 10
    server_version = 10

    def __init__(self, address: str, realtime: str) -> None:
        if address == "nowhere":
            raise FrankaError("Connection to FCI refused")
        if Robot.busy is not None:
            Robot.busy.wait()
        self.fci_version, self.realtime = Robot.version, realtime
        self.q, self.dq, self.mode = HOME.copy(), np.zeros(7), "idle"
        self.time, self.gone, self.broken, self.refuses = 0.0, False, False, False
        self.calls: list[str] = []
        self.limits: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        self.ways: list[tuple[Any, float]] = []
        self.loop: Any = None
        self.hand = Hand()
        self.held = False
        Robot.made = self

    def set_collision_behavior_simple(self, *limits: list[float]) -> None:
        self.limits = limits

    def read_once(self) -> Any:
        if self.gone:
            raise FrankaError("UDP receive: Timeout")
        numbers = {"q": self.q.tolist(), "dq": self.dq.tolist(), "time": self.time}
        return SimpleNamespace(**numbers, robot_mode=self.mode, control_command_success_rate=0.99)

    def automatic_error_recovery(self) -> None:
        if self.broken:
            raise NetworkError("TCP send bytes: Broken pipe")
        if self.refuses:
            raise FrankaError("command not possible in the current mode")
        self.calls.append("recover")
        self.mode = "idle"

    def joint_targets(self, **options: Any) -> Loop:
        self.options, self.mode = options, "move"
        self.loop = Loop(self)
        return self.loop

    def stop(self) -> None:
        self.calls.append("stop")
        self.loop.running, self.mode = False, "idle"

    def gripper(self) -> Hand:
        return self.hand


def module(version: str = "0.4.0") -> Any:
    """Return what `import franka` gives."""
    return SimpleNamespace(FrankaError=FrankaError, ControlException=ControlException, Robot=Robot, __version__=version)
