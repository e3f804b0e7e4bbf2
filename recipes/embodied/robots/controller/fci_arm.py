"""A Franka arm over its control interface (FCI), by franka-rs: a 1 kHz loop on a thread of Rust follows our targets.

Python only sets targets, 10 to 20 per second, so that a slow policy is no fault: the arm comes to rest at its last
target. Everything that may block runs on a separate thread. The interface's own protection stays active: it stops the
arm after 20 lost cycles, at a motion limit, and at a collision; only `reset` recovers from that.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.robots.controller.arm import RESET_SPEED, Arm, period_end
from recipes.embodied.robots.franka_arm import ACTION_VELOCITY, JOINT_MAX, JOINT_MIN, VELOCITY_MAX

# Versions of the interface that franka-rs speaks, and their arms. Only the Research 3's version was tested.
ARMS: Final = {10: "Franka Research 3", 5: "Franka Emika Panda"}
CLOSE_SECONDS: Final = 3.0
# Joint limits of the Research 3 from its data sheet, in radians, and the margin within which franka-rs refuses a
# target.
_RESEARCH_3_MIN = np.array([-2.7437, -1.7837, -2.9007, -3.0421, -2.8065, 0.5445, -3.0159])
_RESEARCH_3_MAX = np.array([2.7437, 1.7837, 2.9007, -0.1518, 2.8065, 4.5169, 3.0159])
_MARGIN = 0.05
_ELBOW = 3  # the joint that folds the arm
# The target leads a held arm by at most the distance of an action of 1 in this time.
_LEAD = 0.6 * ACTION_VELOCITY[:, 0]
_DEVIATION = 10.0  # radians from the start of a loop; our own limits are narrower
_STILL = 0.02  # radians per second
# The interval for measuring a speed, in the arm's own seconds: a light joint may tremble in every cycle.
_SPEED_SECONDS = 0.02
_SETTLE_SECONDS = 0.1  # from a new target until velocities show its motion
_ARRIVED = 0.03  # largest distance from the target at the end of a reset, in radians
_ARRIVAL_SECONDS = 5.0  # in addition to twice the duration of the reset and the braking before it
_REST_SECONDS = 3.0  # time limit of braking
_ROW_SECONDS = 0.02  # between the targets of a reset
_FINGERS_SPEED = 0.1  # meters per second
_FINGERS_WIDTH = 0.08  # meters between open fingers, if the hand does not report it
_log = logging.getLogger("rlinf.robots")


@dataclass(frozen=True, slots=True)
class FciOptions:
    """Limits that are set in the arm.

    Attributes:
        fraction: the fraction of the arm's limits of velocity, acceleration and jerk that motions use.
        torque: the torque at a joint that counts as a collision, in newton meters.
        force: the force at the hand that counts as a collision, in newtons and newton meters; also the force of a
            grasp.
        realtime: `enforce` a kernel with real-time scheduling, or `ignore` its absence.
        gripper: whether the arm has a Franka Hand.
        elbow: the smallest angle of joint 4, in radians. Of the postures with the hand in front of the arm, 8 in 100
            are self-collisions, which trigger reflexes; above -2.6 rad, only 1 in 1000.
    """

    fraction: float = 0.5
    torque: float = 40.0
    force: float = 40.0
    realtime: str = "enforce"
    gripper: bool = True
    elbow: float = -2.6


class WorkerThread:
    """Runs jobs one after the other, on a daemon thread: a job that never returns does not keep the process alive.

    Args:
        name: the name of the thread.
        failed: receives the error of a job, on this thread.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # Jobs that wait or run. An empty queue is no sign of idleness: a job just taken from it has not begun.
        self._left = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether no job runs or waits."""
        with self._lock:
            return self._left == 0

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job after those that wait; returns at once."""
        with self._lock:
            self._left += 1
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception as error:  # noqa: BLE001 - reported to the owner of the thread
                self._failed(error)
            with self._lock:
                self._left -= 1


class FciArm(Arm):
    """A connected arm; `franka_controller.connect_arm` makes one.

    Args:
        franka: the module of franka-rs.
        connect: connects to the arm, and checks its version; called again at a reset after a lost connection.
        options: the limits.
    """

    name = "rlinf-franka"
    low: NDArray[np.float64] = np.maximum(JOINT_MIN, _RESEARCH_3_MIN) + _MARGIN
    high: NDArray[np.float64] = np.minimum(JOINT_MAX, _RESEARCH_3_MAX) - _MARGIN

    def __init__(self, franka: Any, connect: Callable[[], Any], options: FciOptions) -> None:
        super().__init__()
        self._error: type[Exception] = franka.FrankaError
        self._library, self._connect, self._options = str(franka.__version__), connect, options
        self.low = self.low.copy()
        self.low[_ELBOW] = max(self.low[_ELBOW], options.elbow)
        self._past: tuple[Any, ...] = ()  # the states of the last `_SPEED_SECONDS`, oldest first
        self._robot: Any = None
        self._loop: Any = None
        self._hand: Any = None
        self._lost = False  # whether the connection is lost; a reset reconnects
        self._attach()
        self._lock = threading.Lock()
        self._turn = 0  # counts resets and stops; work begun before the latest is abandoned
        self._goal: NDArray[np.float64] | None = None  # the goal of a reset that has not arrived
        self._led = False  # whether the reset's path was given to the loop
        self._late = 0.0  # time limit of the reset's arrival
        self._set = self._end = -math.inf  # the time of the last target, and the end of its control period
        self._moved = 0.0
        self._worker = WorkerThread("rlinf-fci", self._failed)
        self._fingers = WorkerThread("rlinf-gripper", self._failed)

    def joints(self, now: float) -> NDArray[np.float64]:
        return np.array(self._state.q, float)

    def target(self, now: float) -> NDArray[np.float64]:
        """See `Arm`: the arm's position while it is stopped."""
        if self._goal is not None:
            return self._goal.copy()
        loop = self._loop
        return self.joints(now) if loop is None or self.stopped else np.array(loop.target(), float)

    def moves(self, now: float) -> bool:
        """See `Arm`: from the measured velocities; a reset counts as moving until it has arrived."""
        return self._goal is not None or now < self._set + _SETTLE_SECONDS or self._fast()

    @property
    def still_since(self) -> float:
        return self._moved

    @property
    def mode(self) -> str:
        """See `Arm`: `RobotState.robot_mode`, or `disconnected`."""
        return "disconnected" if self._lost else str(self._state.robot_mode)

    @property
    def success_rate(self) -> float:
        """See `Arm`: `RobotState.control_command_success_rate`, over the latest 100 cycles."""
        return float(self._state.control_command_success_rate)

    def reset(self, joints: NDArray[np.float64], now: float) -> float:
        """See `Arm`. First recovers from an error, and reconnects if the connection was lost."""
        goal = self._limited_to_joints(joints)
        seconds = self._reset_seconds(goal, now)
        with self._lock:
            self._turn += 1
            turn = self._turn
            self.stopped, self._goal, self._led = None, goal, False
            self._late = now + _REST_SECONDS + 2 * seconds + _ARRIVAL_SECONDS
        self.clipped = self.gripper_closed = False
        self._worker.submit(lambda: self._lead(goal, turn))
        return now + seconds

    def stop(self, reason: str, now: float) -> None:
        """See `Arm`: the arm brakes, which takes up to 0.3 s at full speed."""
        with self._lock:
            self._turn += 1
            self._goal = None
            if self.stopped is not None:
                return
            self.stopped = reason
        self._worker.submit(self._brake)

    def poll(self, now: float) -> None:
        """See `Arm`: watch for reflexes, and for a reset that has arrived or failed."""
        loop = self._loop
        if loop is not None:
            try:
                self._take(loop.state())
            except self._error as error:
                self._failed(error)
            if not loop.running and self.stopped is None:
                reflexes, words = self._reflexes(loop)
                self.stop(f"the arm ended its motion: {reflexes or words}", now)
        elif self._worker.idle and not self._lost:
            self._worker.submit(self._refresh)
        if self._fast():
            self._moved = now
        goal = self._goal
        if goal is None:
            return
        away = float(np.abs(self.joints(now) - goal).max())
        if self._led and away < _ARRIVED and not self._fast():
            self._goal = None
        elif now > self._late:
            held = f"it is {away:.2f} rad away from its start when it should be there: something may hold it"
            self.stop(held if self._led else "its control unit has not answered a reset", now)

    def close(self) -> None:
        """Stop and disconnect; takes up to `CLOSE_SECONDS`. Idempotent."""
        self.stop("the controller ends", self._end)
        done = threading.Event()
        self._worker.submit(self._forget)
        self._worker.submit(done.set)
        done.wait(CLOSE_SECONDS)

    def _follow(self, goal: NDArray[np.float64], now: float) -> float:
        loop = self._loop
        if loop is None:
            raise ValueError("the arm follows no target")
        try:
            loop.move_to(goal)
        except (self._error, ValueError) as error:
            raise ValueError(str(error)) from None
        self._set, self._end = now, period_end(self._end, now)
        return self._end

    def _limited(self, goal: NDArray[np.float64], now: float) -> NDArray[np.float64]:
        here = self.joints(now)
        return np.clip(self._limited_to_joints(goal), here - _LEAD, here + _LEAD)

    def _limited_to_joints(self, goal: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.clip(goal, self.low, self.high)

    def _take(self, state: Any) -> None:
        """Store a new state, and the past ones for measuring its speed."""
        past = (*self._past, state)
        if state.time < past[0].time:  # the clock of another arm
            past = (state,)
        while len(past) > 1 and state.time - past[1].time >= _SPEED_SECONDS:
            past = past[1:]
        self._state, self._past = state, past

    def _fast(self) -> bool:
        """Return whether the arm moves, judged by its velocities and the distance moved."""
        state, before = self._state, self._past[0]
        if np.abs(np.array(state.dq, float)).max() <= _STILL:
            return False
        seconds = state.time - before.time
        way = np.abs(np.array(state.q, float) - np.array(before.q, float)).max()
        return seconds < _SPEED_SECONDS or bool(way > _STILL * seconds)

    def _grip(self, close: bool) -> None:
        changes = close != self.gripper_closed
        super()._grip(close)
        if changes:
            self._fingers.submit(lambda: self._grasp(close))

    # Run on the threads that may block

    def _attach(self) -> None:
        self._loop = self._robot = self._hand = None  # frees the remains of an earlier connection
        self._robot = robot = self._connect()
        self.firmware = (
            f"{ARMS[robot.fci_version]}, FCI {robot.fci_version}, server {robot.server_version},"
            f" franka-rs {self._library}"
        )
        torques, forces = [self._options.torque] * 7, [self._options.force] * 6
        robot.set_collision_behavior_simple(torques, torques, forces, forces)
        self._hand = robot.gripper() if self._options.gripper else None
        self._refresh()

    def _lead(self, goal: NDArray[np.float64], turn: int) -> None:
        """Move the arm slowly to `goal`, with a new loop if none runs, and open the gripper."""
        if self._lost:
            self._attach()
        if self._loop is not None and not self._loop.running:
            self._reflexes(self._loop)
            self._loop = None
        if self._loop is None:
            self._recover()
            self._rest()
            if turn != self._turn:
                return
            options = self._options
            self._loop = self._robot.joint_targets(fraction=options.fraction, max_deviation=_DEVIATION)
        self._fingers.submit(lambda: self._grasp(False))
        begin = np.array(self._loop.target(), float)
        share = np.abs(goal - begin) / (RESET_SPEED * VELOCITY_MAX * _ROW_SECONDS)
        way = np.linspace(begin, goal, 1 + max(1, math.ceil(float(share.max()))))[1:]
        with self._lock:
            if turn == self._turn:
                self._loop.follow(way, dt=_ROW_SECONDS)
                self._led = True

    def _recover(self) -> None:
        """Clear the arm's error, over a new connection if the earlier one is broken."""
        try:
            self._robot.automatic_error_recovery()
        except self._error as error:
            # After a link failure states may arrive again although the connection for requests has ended.
            if getattr(error, "kind", "") != "network":
                raise
            self._attach()
            self._robot.automatic_error_recovery()

    def _brake(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            if loop.running:
                self._robot.stop()
            reflexes = self._reflexes(loop)[0]
            with self._lock:
                # The arm may have ended its motion before the stop.
                if self.stopped is not None and reflexes not in self.stopped:
                    self.stopped += f"; the arm ended its motion: {reflexes}"
        if not self._lost:
            self._refresh()

    def _rest(self) -> None:
        """Wait until the arm stands: a loop that starts during braking would cause a discontinuity."""
        deadline = time.monotonic() + _REST_SECONDS
        self._refresh()
        while self._fast():
            if time.monotonic() > deadline:
                raise TimeoutError(f"it moves {_REST_SECONDS:g} s after its motion ended")
            self._refresh()

    def _refresh(self) -> None:
        try:
            state = self._robot.read_once()
        except self._error:
            self._lost = True
            raise
        self._lost = False
        self._take(state)

    def _forget(self) -> None:
        self._loop = self._robot = None  # frees the arm for the next client

    def _grasp(self, close: bool) -> None:
        if self._hand is None or close != self.gripper_closed:
            return  # no hand, or a newer command for the opposite
        if close:
            width = _FINGERS_WIDTH
            self._hand.grasp(0.0, _FINGERS_SPEED, self._options.force, epsilon_inner=width, epsilon_outer=width)
        else:
            self._hand.move(float(self._hand.read_once().max_width) or _FINGERS_WIDTH, _FINGERS_SPEED)

    def _reflexes(self, loop: Any) -> tuple[str, str]:
        """End a loop; return the names of the arm errors that ended it, if any, and the error in words."""
        try:
            loop.stop()
        except self._error as error:
            return ", ".join(getattr(error, "errors", ())), str(error)
        return "", "the loop of targets ended"

    def _failed(self, error: Exception) -> None:
        _log.warning("the arm failed: %s", error)
        self.stop(f"the arm failed: {error}", self._end)
