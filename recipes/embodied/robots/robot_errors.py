"""The errors of robots. Each names the robot and its address, and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinf_core.errors import RuntimeFailure


class RobotError(RuntimeFailure):
    """Base of errors between a process and its robot; `where` is the robot and its address."""


class RobotUnreachableError(RobotError):
    """Nothing answers at the robot's address, or something other than its controller."""


class RobotLeaseError(RobotError):
    """Another client holds the robot, or this process does not.

    Attributes:
        holder: the holder's self-chosen name; None: no holder.
    """

    def __init__(self, message: str, *, holder: str | None, **about: str | None) -> None:
        super().__init__(message, **about)
        self.holder = holder


class RobotLinkLostError(RobotError):
    """The connection broke, or a response timed out. The controller stops the arm by itself."""


class RobotStoppedError(RobotError):
    """The arm stands still after a stop and moves again only after a reset.

    Attributes:
        reason: why the arm was stopped.
    """

    def __init__(self, reason: str, *, where: str | None = None, help: str | None = None) -> None:
        super().__init__("the arm was stopped", where=where, why=reason, help=help)
        self.reason = reason


class RobotSilentError(RobotStoppedError):
    """The arm was stopped during a motion, because this process was silent for two control periods."""


class RobotLateError(RobotError):
    """An action arrived too late and was not executed."""


class RobotCheckError(RobotError):
    """A check before the arm moves has found a fault."""


class RobotRefusedError(RobotError):
    """The controller rejected a request: too fast, non-finite, or during another motion."""


def refusal_error(reply: Mapping[str, Any], where: str) -> RobotError:
    """Return the error for a refusal, which names the robot `where`."""
    code, message = reply.get("code"), str(reply.get("message"))
    holder = None if reply.get("holder") is None else str(reply["holder"])
    if code == "busy":
        return RobotLeaseError(
            "the arm is in use",
            holder=holder,
            where=where,
            why=message,
            help="end that process, or wait until it is done; give each env worker its own arm",
        )
    if code == "no-lease":
        return RobotLeaseError(
            "this process does not hold the arm",
            holder=holder,
            where=where,
            why=message,
            help="acquire it first; a lease is lost with its connection, or after a heartbeat of silence",
        )
    if code in ("stopped", "silent"):
        kind = RobotSilentError if code == "silent" else RobotStoppedError
        return kind(message, where=where, help="look at the arm, then reset it")
    if code == "late":
        return RobotLateError(
            "an action came too late and was not executed",
            where=where,
            why=message,
            help="check the link between this node and the controller: cable, switch, wireless, other traffic",
        )
    return RobotRefusedError(
        "the controller rejected the request",
        where=where,
        why=message,
        help="no action was executed; keep actions within -1 and 1, and starts within the workspace",
    )
