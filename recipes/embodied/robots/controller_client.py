"""Client of an arm's controller: every call has a deadline, every error names the robot and the remedy."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import platform
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from recipes.embodied.robots.franka_arm import CONTROL_SECONDS
from recipes.embodied.robots.robot_errors import (
    RobotError,
    RobotLeaseError,
    RobotLinkLostError,
    RobotRefusedError,
    RobotSilentError,
    RobotUnreachableError,
    refusal_error,
)
from recipes.embodied.robots.wire_protocol import (
    MAX_HOLDER,
    MAX_LINE,
    NAME,
    PROTOCOL,
    ArmState,
    ControllerFacts,
    Message,
    ProtocolError,
    decode,
    encode,
)
from rlinf_core.hardware.franka import Franka

_log = logging.getLogger("rlinf.robots")
CALL_SECONDS = 10.0
# The interval of signs of life: several within the two control periods of silence after which a moving arm is stopped.
SIGN_SECONDS = CONTROL_SECONDS / 2
RESET_SECONDS = 60.0  # enough for the motion to any start at the speed of a reset
HEARTBEAT_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 0.1
_GOODBYE_SECONDS = 1.0
_SIGNS_PER_HEARTBEAT = 4  # several, so that a late one does not cost the lease


class FrankaClient:
    """A connection to the controller of one arm. Not thread-safe.

    Args:
        arm: the arm's entry in the configuration.
        seconds: the time limit of a call; for a reset, at least `RESET_SECONDS`.
        heartbeat: seconds of silence after which the controller revokes a holder's lease.

    Raises:
        RobotUnreachableError: nothing answers there in time, or something other than a controller.
    """

    def __init__(self, arm: Franka, *, seconds: float = CALL_SECONDS, heartbeat: float = HEARTBEAT_SECONDS) -> None:
        self.where = f"Franka arm {arm.robot_ip}:{arm.robot_port} of node {arm.node_rank}"
        if arm.controller_node_rank is not None:
            self.where += f", controller on node {arm.controller_node_rank}"
        self._gripper = {"type": arm.gripper_type, "connection": arm.gripper_connection}
        self._workspace = arm.workspace
        self._followed: tuple[float, float] | None = None  # the clock in the last reply, and the reply's arrival time
        self._seconds, self._heartbeat = seconds, heartbeat
        self._ids = itertools.count(1)
        self._writing = threading.Lock()
        self._rest = b""
        self._closed = threading.Event()
        self._beating: threading.Thread | None = None
        try:
            self._socket = socket.create_connection((arm.robot_ip, arm.robot_port), timeout=seconds)
        except OSError as error:
            raise self._unreachable(_reason(error, seconds)) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stranger = f"the listener is not an rlinf controller with protocol {PROTOCOL}"
        try:
            reply = self._request("ping")
        except RobotError as error:
            self.close()
            malformed = isinstance(error.__cause__, ProtocolError)
            raise self._unreachable(stranger if malformed else error.why or error.message) from error
        if reply.get("robot") != NAME or reply.get("protocol") != PROTOCOL:
            self.close()
            raise self._unreachable(stranger)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether the connection was closed, by either side."""
        return self._closed.is_set()

    def acquire(self, patience: float = 0.0) -> ArmState:
        """Take the arm for this process, until `release`, `close`, or the end of the process.

        Args:
            patience: seconds for which to retry while somebody else holds the arm.

        Raises:
            RobotLeaseError: somebody else still holds the arm after `patience`.
            RobotLinkLostError: the controller does not answer.
        """
        until = time.monotonic() + patience
        while True:
            try:
                reply = self._request(
                    "acquire",
                    holder=holder_name(),
                    heartbeat=self._heartbeat,
                    gripper=self._gripper,
                    workspace=self._workspace,
                )
                break
            except RobotLeaseError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_ASK_AGAIN_SECONDS)
        state = self._state_of(reply)
        if self._beating is None:
            self._beating = threading.Thread(target=self._beat, name="rlinf-robot-heartbeat", daemon=True)
            self._beating.start()
        return state

    def state(self) -> ArmState:
        """Return the state of the arm; no lease is needed.

        Raises:
            RobotLinkLostError: the controller does not answer.
        """
        return self._state_of(self._request("state"))

    def reset(self, joints: Sequence[float] | NDArray[np.floating]) -> ArmState:
        """Move to `joints` (7, radians) with an open gripper, and wait for the arrival. Ends a stop.

        Raises:
            RobotStoppedError: the arm was stopped on the way.
            RobotLeaseError: this process does not hold the arm.
            RobotLinkLostError: the controller does not answer.
        """
        sent, allowed = self._finite(joints), max(RESET_SECONDS, self._seconds)
        until = time.monotonic() + allowed
        while True:
            try:
                return self._state_of(self._request("reset", allowed, joints=sent))
            except RobotSilentError as error:
                # This process was only delayed: the arm continues from where it stopped.
                if time.monotonic() >= until:
                    raise
                _log.warning("%s; resuming", error)

    def move(self, deltas: Sequence[float] | NDArray[np.floating], close_gripper: bool | None = None) -> ArmState:
        """Move the target by `deltas` (7, radians), and wait for the end of the control period. The arm may lag behind.

        Args:
            deltas: the motion, in which no joint may exceed its velocity.
            close_gripper: whether to close or open the gripper; None: leave it.

        Raises:
            RobotStoppedError: the arm stands still until a reset.
            RobotRefusedError: a joint would be too fast, or a number is not finite.
            RobotLateError: the action or the previous reply was in transit for too long; call `state` before the next
                action.
            RobotLeaseError: this process does not hold the arm.
            RobotLinkLostError: the controller does not answer.
        """
        sent = self._finite(deltas)
        timing: dict[str, Any] = {}
        if self._followed is not None:
            clock, came = self._followed
            timing = {"after": clock, "waited": time.monotonic() - came}
        return self._state_of(self._request("move", deltas=sent, close_gripper=close_gripper, **timing))

    def facts(self) -> ControllerFacts:
        """Return the controller's description of itself; needs no lease.

        Raises:
            RobotLinkLostError: the controller does not answer, or sends an invalid reply.
        """
        reply = self._request("ping")
        try:
            return ControllerFacts.of(reply)
        except ProtocolError as error:
            self._abandon()
            raise self._lost(f"the controller does not report its limits: {error}") from error

    def latency(self, count: int) -> list[float]:
        """Return the round-trip times of `count` requests, in seconds.

        Raises:
            RobotLinkLostError: the controller does not answer.
        """
        latencies: list[float] = []
        for _ in range(count):
            began = time.monotonic()
            self._request("ping")
            latencies.append(time.monotonic() - began)
        return latencies

    def _finite(self, numbers: Sequence[float] | NDArray[np.floating]) -> list[float]:
        """Return numbers in the form in which they are sent.

        Raises:
            RobotRefusedError: a number is NaN or infinite; the arm is stopped, and stands still until a reset.
        """
        values = [float(number) for number in numbers]
        if not all(map(math.isfinite, values)):
            with contextlib.suppress(RobotError):
                self.stop()
            raise RobotRefusedError(
                "an action is not finite, so the arm was stopped",
                where=self.where,
                help="look for NaN or infinity in the policy's weights and observations; then reset the arm",
            )
        return values

    def stop(self) -> ArmState:
        """Stop the arm immediately, regardless of its holder. It stands still until its holder resets it.

        Raises:
            RobotLinkLostError: the controller does not answer.
        """
        return self._state_of(self._request("stop"))

    def release(self) -> ArmState:
        """Release the arm.

        Raises:
            RobotLeaseError: this process does not hold the arm.
            RobotLinkLostError: the controller does not answer.
        """
        return self._state_of(self._request("release"))

    def close(self) -> None:
        """Release the arm if it is held, and close the connection. Idempotent."""
        if self._beating is not None and not self._closed.is_set():
            with contextlib.suppress(RobotError):  # even if `release` fails, the end of the connection frees the arm
                self._request("release", _GOODBYE_SECONDS)
        self._abandon()

    def _abandon(self) -> None:
        """End the connection without a message; the controller stops an arm that is held over it."""
        self._closed.set()
        self._socket.close()

    def _request(self, op: str, seconds: float | None = None, **fields: object) -> Message:
        """Send a request and return its reply.

        Raises:
            RobotLinkLostError: the link is broken, or no answer came in time; the connection is closed.
            RobotError: the error for the controller's refusal.
        """
        number, allowed = next(self._ids), seconds or self._seconds
        if self._closed.is_set():
            raise self._lost("the connection is closed")
        try:
            self._write(encode({"op": op, "id": number, **fields}))
            reply = self._reply(number, allowed)
        except ProtocolError as error:
            self._abandon()
            raise self._lost(f"the response was {error}") from error
        except OSError as error:
            self._abandon()
            raise self._lost(_reason(error, allowed)) from error
        if reply.get("ok") is not True:
            raise refusal_error(reply, self.where)
        return reply

    def _write(self, line: bytes) -> None:
        with self._writing:
            self._socket.sendall(line)

    def _reply(self, number: int, seconds: float) -> Message:
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            while b"\n" not in self._rest:
                if len(self._rest) > MAX_LINE:
                    raise ProtocolError(f"a line of more than {MAX_LINE} bytes")
                left = max(deadline - time.monotonic(), 0)
                # The socket's own timeout is not used, since it also applies to the heartbeat.
                if not poll.poll(math.ceil(left * 1000)):
                    raise TimeoutError
                received = self._socket.recv(MAX_LINE)
                if not received:
                    raise ConnectionResetError
                self._rest += received
            line, _, self._rest = self._rest.partition(b"\n")
            reply = decode(line)
            if reply.get("id") in (number, 0):  # 0: a request that the controller could not parse
                return reply

    def _beat(self) -> None:
        line = encode({"op": "beat", "id": 0})
        while not self._closed.wait(min(SIGN_SECONDS, self._heartbeat / _SIGNS_PER_HEARTBEAT)):
            try:
                self._write(line)
            except OSError:
                return  # the next call reports the loss

    def _state_of(self, reply: Message) -> ArmState:
        try:
            state = ArmState.of(reply)
        except ProtocolError as error:
            self._abandon()
            raise self._lost(f"the response was {error}") from error
        clock = reply.get("clock")
        if isinstance(clock, float):
            self._followed = clock, time.monotonic()
        return state

    def _unreachable(self, why: str) -> RobotUnreachableError:
        return RobotUnreachableError(
            "the arm's controller does not respond",
            where=self.where,
            why=why,
            help="start it, and check `robot_ip`, `robot_port` and the cable: `python -m"
            " recipes.embodied.robots.controller.franka_controller --fci ARM`, or `simulated_controller` there,"
            " with `--host IP --port PORT`",
        )

    def _lost(self, why: str) -> RobotLinkLostError:
        return RobotLinkLostError(
            "the link to the arm was lost",
            where=self.where,
            why=why,
            help="the arm stops by itself; check the controller and the cable, then start again",
        )


def holder_name() -> str:
    """Return the name of this process for other clients: `process 71 on lab-3`."""
    name = f"process {os.getpid()} on {platform.node() or 'an unnamed host'}"
    return "".join(character for character in name if character.isprintable())[:MAX_HOLDER]


def _reason(error: OSError, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no response within {seconds:g} s"
    if isinstance(error, BrokenPipeError | ConnectionResetError):
        return "the controller closed the connection"
    return error.strerror or str(error)
