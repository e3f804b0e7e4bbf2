"""Events of `up` and `down`: the phase of each node."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Phase(StrEnum):
    """The phases of a node, in order."""

    CONNECT = "connect"
    PROBE = "probe"
    SYNC = "sync code"
    HEAD = "start head"
    JOIN = "join"
    VERIFY = "verify"
    STOP = "stop"


class Progress(StrEnum):
    BEGUN = "begun"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"
    """Not tried, because a precondition failed."""


class Event(NamedTuple):
    """A phase event of one node.

    Attributes:
        rank: the node.
        phase: its phase.
        progress: begun, done, failed or skipped.
        detail: details, such as the reason of a failure; may be empty.
        deadline: time limit of a phase that begins, in seconds.
    """

    rank: int
    phase: Phase
    progress: Progress
    detail: str = ""
    deadline: float | None = None


Emit: TypeAlias = Callable[[Event], None]


class NodeFailure(NamedTuple):
    """The failure of a node.

    Attributes:
        node: its name, as in `node 3 (trainer03)`.
        phase: the failed phase.
        message, why, help: the error, its cause and the remedy; the last two may be empty.
        rc: the exit code of the failed command, or None.
        lines: the last lines of the failed command; may be empty.
    """

    rank: int
    node: str
    phase: Phase
    message: str
    why: str = ""
    help: str = ""
    rc: int | None = None
    lines: str = ""
