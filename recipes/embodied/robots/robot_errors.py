"""The errors of robots. Each names the robot and its address, and the remedy."""

from __future__ import annotations

from rlinf_core.errors import RuntimeFailure


class RobotError(RuntimeFailure):
    """Base of errors between a process and its robot; `where` is the robot and its address."""


class RobotUnreachableError(RobotError):
    """Nothing answers at the robot's address, or something else than its controller does."""


class RobotLeaseError(RobotError):
    """Another client holds the robot, or this process does not.

    Attributes:
        holder: the holder's self-chosen name; None: none.
    """

    def __init__(
        self,
        message: str,
        *,
        holder: str | None,
        where: str | None = None,
        why: str | None = None,
        help: str | None = None,
    ) -> None:
        super().__init__(message, where=where, why=why, help=help)
        self.holder = holder


class RobotLinkLostError(RobotError):
    """The connection broke, or a response timed out. The controller stops the arm by itself."""


class RobotStoppedError(RobotError):
    """The arm stands still after a stop and moves again only after a reset.

    Attributes:
        reason: why it was stopped.
    """

    def __init__(self, reason: str, *, where: str | None = None, help: str | None = None) -> None:
        super().__init__("the arm was stopped", where=where, why=reason, help=help)
        self.reason = reason


class RobotSilentError(RobotStoppedError):
    """The arm was stopped on its way because nothing was heard from this process for two control periods."""


class RobotLateError(RobotError):
    """An action arrived too late and was not executed."""


class RobotCheckError(RobotError):
    """A check before the arm moves has found a fault."""


class RobotRefusedError(RobotError):
    """The controller rejected a request: too fast, not a number, or during another motion."""
