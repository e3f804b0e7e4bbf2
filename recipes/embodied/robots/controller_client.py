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
from rlinf_core.hardware.robots.franka import Franka

_log = logging.getLogger("rlinf.robots")
CALL_SECONDS = 10.0
# Between signs of life: several in the two control periods of silence after which an arm on its way is stopped.
SIGN_SECONDS = CONTROL_SECONDS / 2
RESET_SECONDS = 60.0  # the way to any start, at the speed of a reset, and some more
HEARTBEAT_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 0.1
_GOODBYE_SECONDS = 1.0
_SIGNS_PER_HEARTBEAT = 4  # so that one that is late does not cost the lease


class FrankaClient:
    """A connection to the controller of one arm. Not thread-safe.

    Args:
        arm: what the configuration says about it.
        seconds: the seconds within which a call must have its answer; a reset has `RESET_SECONDS` or this, whichever is
            more.
        heartbeat: seconds after which the controller takes the arm from a holder that has gone silent.

    Raises:
        RobotUnreachableError: nothing answers there in time, or something else does.
    """

    def __init__(self, arm: Franka, *, seconds: float = CALL_SECONDS, heartbeat: float = HEARTBEAT_SECONDS) -> None:
        self.where = f"Franka arm {arm.robot_ip}:{arm.robot_port} of node {arm.node_rank}"
        if arm.controller_node_rank is not None:
            self.where += f", controller on node {arm.controller_node_rank}"
        self._gripper = {"type": arm.gripper_type, "connection": arm.gripper_connection}
        self._workspace = arm.workspace
        self._followed: tuple[float, float] | None = None  # the clock of the last reply, and when it came
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
        try:
            reply = self._request("ping")
        except RobotError as error:
            self.close()
            raise self._unreachable(error.why or error.message) from error
        if reply.get("robot") != NAME or reply.get("protocol") != PROTOCOL:
            self.close()
            raise self._unreachable(f"the listener is not an rlinf controller with protocol {PROTOCOL}")

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
            patience: seconds for which to ask again while somebody else holds it.

        Raises:
            RobotLeaseError: somebody else holds it, and still does after `patience`.
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
        """Go to `joints` (7, radians) with an open gripper, and wait until the arm is there. Ends a stop.

        Raises:
            RobotStoppedError: it was stopped on the way.
            RobotLeaseError: this process does not hold the arm.
            RobotLinkLostError: the controller does not answer.
        """
        sent, allowed = self._finite(joints), max(RESET_SECONDS, self._seconds)
        until = time.monotonic() + allowed
        while True:
            try:
                return self._state_of(self._request("reset", allowed, joints=sent))
            except RobotSilentError as error:
                # This process was delayed, not dead: the arm continues from where it stopped.
                if time.monotonic() >= until:
                    raise
                _log.warning("%s; resuming", error)

    def move(self, deltas: Sequence[float] | NDArray[np.floating], close_gripper: bool | None = None) -> ArmState:
        """Move the target by `deltas` (7, radians), and wait until the control period is over. The arm may lag behind.

        Args:
            deltas: no joint may be faster than it can be.
            close_gripper: close or open it; None: leave it.

        Raises:
            RobotStoppedError: the arm stands still until a reset.
            RobotRefusedError: a joint would be too fast, or a number is not finite.
            RobotLateError: the action or the reply before it was under way for too long; `state` has to come before the
                next one.
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
            RobotLinkLostError: it does not answer, or says something else.
        """
        reply = self._request("ping")
        try:
            return ControllerFacts.of(reply)
        except ProtocolError as error:
            self._abandon()
            raise self._lost(f"the controller does not report its limits: {error}") from error

    def latency(self, count: int) -> list[float]:
        """Return the seconds that each of some questions took to be answered.

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
        """Return numbers as they are sent.

        Raises:
            RobotRefusedError: one of them is NaN or infinite; the arm is stopped, and stands still until a reset.
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
        """Give the arm back.

        Raises:
            RobotLeaseError: this process does not hold it.
            RobotLinkLostError: the controller does not answer.
        """
        return self._state_of(self._request("release"))

    def close(self) -> None:
        """Release the arm if it is held, and close the connection. Idempotent."""
        if self._beating is not None and not self._closed.is_set():
            with contextlib.suppress(RobotError):  # whether it hears it or not, the end of the connection frees the arm
                self._request("release", _GOODBYE_SECONDS)
        self._abandon()

    def _abandon(self) -> None:
        """End the connection without a word; the controller stops an arm that is held over it."""
        self._closed.set()
        self._socket.close()

    def _request(self, op: str, seconds: float | None = None, **fields: object) -> Message:
        """Send a request and return its reply.

        Raises:
            RobotLinkLostError: the link is broken, or no answer came in time; the connection is closed.
            RobotError: of the kind that the controller's refusal is.
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
                # Not by the socket's own timeout, which is the heartbeat's too.
                if not poll.poll(math.ceil(left * 1000)):
                    raise TimeoutError
                received = self._socket.recv(MAX_LINE)
                if not received:
                    raise ConnectionResetError
                self._rest += received
            line, _, self._rest = self._rest.partition(b"\n")
            reply = decode(line)
            if reply.get("id") in (number, 0):  # 0: a request that the controller did not understand
                return reply

    def _beat(self) -> None:
        """Send heartbeats to the controller; runs in a thread of its own."""
        line = encode({"op": "beat", "id": 0})
        while not self._closed.wait(min(SIGN_SECONDS, self._heartbeat / _SIGNS_PER_HEARTBEAT)):
            try:
                self._write(line)
            except OSError:
                return  # the next call finds it out and says so

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
