"""Events of `up` and `down` while they work: which node is in which phase."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Phase(StrEnum):
    """The steps of a node, in their order."""

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
    """Not tried, because what it needs is not there."""


class Event(NamedTuple):
    """One step of one node.

    Attributes:
        rank: the node.
        phase: what it is in.
        progress: how far.
        detail: what there is to say, as the reason of a failure; may be empty.
        deadline: seconds that the phase may take, where it begins.
    """

    rank: int
    phase: Phase
    progress: Progress
    detail: str = ""
    deadline: float | None = None


Tell: TypeAlias = Callable[[Event], None]


class NodeFailure(NamedTuple):
    """The failure of one node.

    Attributes:
        node: who, as in `node 3 (trainer03)`.
        phase: in which step.
        message, why, help: what, its cause, and what to do; the last two may be empty.
        rc: the exit code that goes with it, or None.
        lines: the last lines of what failed; may be empty.
    """

    rank: int
    node: str
    phase: Phase
    message: str
    why: str = ""
    help: str = ""
    rc: int | None = None
    lines: str = ""
