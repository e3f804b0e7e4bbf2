"""The decisions of an arm's controller: lease, motion and stops. Uses no sockets and no clock.

The network is in `controller_server.py`, which passes requests and times; the arm is any `Arm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from recipes.embodied.robots.controller.arm import Arm, SimulatedCameras
from recipes.embodied.robots.franka_arm import CONTROL_SECONDS, VELOCITY_MAX
from recipes.embodied.robots.wire_protocol import (
    NAME,
    PROTOCOL,
    Acquiring,
    Box,
    ControllerRequest,
    Gripper,
    Message,
    Moving,
    ProtocolError,
    Resetting,
)

VERSION: Final = "3.0"
# The holder's silence after which a moving arm stops, and the delay after which an action is too old.
WATCHDOG_SECONDS: Final = 2 * CONTROL_SECONDS
LATE_SECONDS: Final = 2 * CONTROL_SECONDS
# The interval of checks on an arm that is late.
POLL_SECONDS: Final = CONTROL_SECONDS / 5


@dataclass(frozen=True, slots=True)
class Lease:
    """The holder of the arm, with the expiry of the lease.

    Attributes:
        connection: the number of the holder's connection.
        holder: the holder's self-chosen name.
        heartbeat: seconds without a sign of life after which the holder counts as lost.
        heard: the time of the last sign of life.
    """

    connection: int
    holder: str
    heartbeat: float
    heard: float


@dataclass(frozen=True, slots=True)
class Motion:
    """A motion in progress; the reply is sent when it ends.

    Attributes:
        id: the id of the request.
        number: the number of the motion.
        end: the end of the control period of a move, or the earliest arrival of a reset.
        arrives: whether the reply waits until the arm stands at its target, as for a reset.
    """

    id: int
    number: int
    end: float
    arrives: bool = False


class Refusal(Exception):  # noqa: N818 - an answer, not a failure of the controller
    """A request that is not executed, and the reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Controller:
    """One arm, held by one client at a time. Connections are numbers; times are monotonic seconds.

    Attributes:
        looked: when the arm was last checked, if it is watched continually; None: it is not watched.
    """

    def __init__(self, arm: Arm, cameras: SimulatedCameras | None = None, workspace: Box | None = None) -> None:
        self._arm = arm
        self._cameras = cameras or SimulatedCameras()
        self._workspace = arm.workspace = workspace
        self.looked: float | None = None
        self._heard = 0.0
        self._lease: Lease | None = None
        self._gripper: Gripper | None = None
        self._motion = 0  # number of the latest motion
        self._latest: Motion | None = None
        self._ended = 0  # number of the latest motion whose reply was due
        self._interrupted = 0  # number of the latest interrupted motion
        self._silenced = 0  # number of the latest motion that was interrupted by its holder's silence
        self._operations: dict[str, Callable[[int, ControllerRequest, float], Message | Motion | None]] = {
            "ping": self._ping,
            "state": self._state,
            "acquire": self._acquire,
            "beat": self._beat,
            "reset": self._reset,
            "move": self._move,
            "stop": self._stop,
            "release": self._release,
        }

    @property
    def holder(self) -> str | None:
        """The holder of the arm, in words."""
        return None if self._lease is None else self._lease.holder

    def handle(self, connection: int, request: ControllerRequest, now: float) -> Message | Motion | None:
        """Execute a client's request.

        Returns:
            The reply; or a motion, whose reply `finish` returns after its end; or None if no reply is expected.

        Raises:
            ProtocolError: the request is malformed: the sender is not an rlinf client.
        """
        self.expire(now)
        if self._lease and self._lease.connection == connection:
            self._lease, self._heard = replace(self._lease, heard=now), now
        operation = self._operations.get(request.op)
        if operation is None:
            raise ProtocolError(f"unknown operation {request.op[:40]!r}")
        try:
            return operation(connection, request, now)
        except Refusal as refusal:
            return self._refused(request.id, refusal)

    def finish(self, motion: Motion, now: float) -> Message:
        """Return the reply to the request that began a motion, after it has ended or been interrupted."""
        if self.interrupted(motion):
            why = self._arm.stopped or "it was interrupted"
            code = "silent" if motion.number == self._silenced else "stopped"
            return self._refused(motion.id, Refusal(code, why))
        return self._report(motion.id, max(now, motion.end))

    def interrupted(self, motion: Motion) -> bool:
        """Return whether a stop came before the motion's end."""
        return motion.number <= self._interrupted

    def ended(self, motion: Motion, now: float) -> bool:
        """Return whether the motion's reply is due: the control period is over and, if required, the arm is there."""
        if now >= motion.end and not (motion.arrives and self._arm.moves(now)):
            # An arm that has arrived may be pushed later, which is another motion.
            self._ended = max(self._ended, motion.number)
        return motion.number <= self._ended

    def lost(self, connection: int, reason: str, now: float) -> bool:
        """Handle the end of a connection. If it held the arm, the arm stops and is free; return whether it did."""
        if self._lease is None or self._lease.connection != connection:
            return False
        self.watch(now)
        self._halt(f"{self._lease.holder} held it, and {reason}", now)
        self._lease = None
        return True

    def expire(self, now: float) -> bool:
        """Stop the arm, or revoke the lease, if the holder has been silent for too long; return whether the lease was
        revoked.

        The stop is dated to when the silence became too long, even if that is noticed later.
        """
        self.watch(now)
        lease = self._lease
        if lease is None or now < lease.heard + lease.heartbeat:
            return False
        return self.lost(lease.connection, f"sent nothing for {lease.heartbeat:g} s", now)

    def due(self, motion: Motion, now: float) -> float:
        """Return when to check a motion again: when it ends, or its holder's timeout expires."""
        return min(motion.end if now < motion.end else now + POLL_SECONDS, self._heard + WATCHDOG_SECONDS)

    def watch(self, now: float) -> None:
        """Handle events of the arm itself, and stop it when its holder has been silent for too long.

        If this process itself was delayed that long, the holder's messages are still unread: the holder is not at
        fault, and the lease continues.
        """
        delay = 0.0 if self.looked is None else now - self.looked
        self.looked = None if self.looked is None else now
        self._arm.poll(now)
        if self._arm.stopped:
            self._interrupt(now)
        if self._lease is None or now < (end := self._heard + WATCHDOG_SECONDS) or not self._arm.moves(end):
            return
        self._silenced = self._motion
        if delay <= WATCHDOG_SECONDS:
            self._halt(f"{self._lease.holder} sent nothing for {WATCHDOG_SECONDS:g} s while the arm moved", end)
            return
        self._halt(f"the controller was held up for {delay:.2g} s while the arm moved", end)
        self._lease, self._heard = replace(self._lease, heard=now), now

    def silence_allowed(self, connection: int) -> float | None:
        """Return the seconds of silence after which the connection counts as lost; None if it does not hold the arm."""
        lease = self._lease
        return lease.heartbeat if lease and lease.connection == connection else None

    def _ping(self, connection: int, request: ControllerRequest, now: float) -> Message:
        low, high = self._arm.low.tolist(), self._arm.high.tolist()
        limits = {"velocity": VELOCITY_MAX.tolist(), "low": low, "high": high}
        reply = {"robot": NAME, "protocol": PROTOCOL, "controller": self._arm.name, "version": VERSION}
        reply |= {"firmware": self._arm.firmware, "period": CONTROL_SECONDS, "limits": limits, "holder": self.holder}
        return {"id": request.id, "ok": True, **reply}

    def _state(self, connection: int, request: ControllerRequest, now: float) -> Message:
        return self._report(request.id, now)

    def _acquire(self, connection: int, request: ControllerRequest, now: float) -> Message:
        asked = Acquiring.of(request.fields)
        if self._lease and self._lease.connection != connection:
            raise Refusal("busy", f"{self._lease.holder} holds the arm")
        self._lease, self._heard = Lease(connection, asked.holder, asked.heartbeat, now), now
        self._gripper = asked.gripper
        self._arm.workspace = within(self._workspace, asked.workspace)
        return self._report(request.id, now)

    def _beat(self, connection: int, request: ControllerRequest, now: float) -> None:
        return None

    def _reset(self, connection: int, request: ControllerRequest, now: float) -> Motion:
        joints = Resetting.of(request.fields).joints
        self._check_holder(connection)
        self._check_answered(now)
        joints = joints.clip(self._arm.low, self._arm.high)
        if not self._arm.inside(joints):
            raise Refusal("refused", "the hand would leave its workspace, or go below the table")
        return self._moving(request, self._arm.reset(joints, now), arrives=True)

    def _move(self, connection: int, request: ControllerRequest, now: float) -> Motion:
        asked = Moving.of(request.fields)
        self._check_holder(connection)
        if self._arm.stopped:
            raise Refusal("stopped", self._arm.stopped)
        self._check_answered(now)
        delay = asked.delay(now)
        if delay > LATE_SECONDS:
            raise Refusal("late", f"it arrived {1000 * delay:.0f} ms late; {1000 * LATE_SECONDS:.0f} are allowed")
        try:
            return self._moving(request, self._arm.move(asked.deltas, asked.close_gripper, now))
        except ValueError as error:
            raise Refusal("refused", str(error)) from None

    def _stop(self, connection: int, request: ControllerRequest, now: float) -> Message:
        lease = self._lease
        whose = "its holder" if lease and lease.connection == connection else "a client that does not hold it"
        self._halt(f"{whose} asked for it", now)
        return self._report(request.id, now)

    def _release(self, connection: int, request: ControllerRequest, now: float) -> Message:
        self._check_holder(connection)
        if self._arm.moves(now):
            self._halt("its holder released it while it moved", now)
        self._lease = None
        return self._report(request.id, now)

    def _check_holder(self, connection: int) -> None:
        if self._lease is None or self._lease.connection != connection:
            held = f"{self._lease.holder} holds it" if self._lease else "it is free"
            raise Refusal("no-lease", f"this connection does not hold the arm, {held}")

    def _check_answered(self, now: float) -> None:
        motion = self._latest
        if motion is not None and not self.interrupted(motion) and not self.ended(motion, now):
            raise Refusal("refused", "the last motion has not been answered yet")

    def _moving(self, request: ControllerRequest, end: float, *, arrives: bool = False) -> Motion:
        self._motion += 1
        self._latest = Motion(request.id, self._motion, end, arrives)
        return self._latest

    def _halt(self, reason: str, now: float) -> None:
        self._interrupt(now)
        self._arm.stop(reason, now)

    def _interrupt(self, now: float) -> None:
        """Count the latest motion as interrupted, unless its reply is due."""
        if self._latest is not None and not self.ended(self._latest, now):
            self._interrupted = self._motion

    def _report(self, number: int, now: float) -> Message:
        report: dict[str, Any] = {"joints": self._arm.joints(now).tolist(), "target": self._arm.target(now).tolist()}
        report |= {"mode": self._arm.mode, "success_rate": self._arm.success_rate}
        report |= {"gripper_closed": self._arm.gripper_closed, "stopped": self._arm.stopped, "holder": self.holder}
        report |= {"clock": now, "clipped": self._arm.clipped, "cameras": self._cameras.ages(now)}
        report |= {"tick": to_tick(now), "heard_tick": to_tick(self._heard)}
        report["still_tick"] = None if self._arm.moves(now) else to_tick(self._arm.still_since)
        # A simulated gripper has no device: its declaration is only echoed.
        report["gripper"] = self._gripper.model_dump() if self._gripper else None
        return {"id": number, "ok": True, **report}

    def _refused(self, number: int, refusal: Refusal) -> Message:
        return {"id": number, "ok": False, "code": refusal.code, "message": str(refusal), "holder": self.holder}


def to_tick(moment: float) -> int:
    """Return the number of the control period at a time."""
    return int(moment // CONTROL_SECONDS)


def within(first: Box | None, second: Box | None) -> Box | None:
    """Return the intersection of two boxes; None means all of space."""
    if first is None or second is None:
        return first or second
    low = tuple(map(max, first.low, second.low))
    return Box(low, tuple(map(min, first.high, second.high)))
