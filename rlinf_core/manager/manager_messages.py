"""The messages between the manager and the processes of a job.

A `ManagerRequest` is answered by a `Reply` of the same serial, a `Question` by a `ProcessAnswer`; everything else wants
no answer. All of it travels between authenticated endpoints of one rlinf, so plain pickled values will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.failures import PackedError
from rlinf_core.manager.wait_edges import ChannelView
from rlinf_core.manager.worker_registry import WorkerRecord
from rlinf_core.waiting import Publication

# The endpoint's service for these messages; far from the small numbers, which channels use.
CONTROL = 60_000
MANAGER = "manager"
DRIVER = "driver"
# What the name of whoever looks at a job from outside begins with.
INSPECTOR = "inspect"


# From a process to the manager


@dataclass(frozen=True, slots=True)
class Hello:
    """A process is there. The link that it comes through tells its address.

    Attributes:
        incarnation: which life of its group it belongs to; 0 for what is no worker.
        node: where it runs, in words, as in `node 1 (10.0.0.2)`.
        device: what it computes on, as in `cuda:0`; empty when it is the CPU.
        log: the file on its node that its standard error goes to, or None.
        memory_kills: how many processes the kernel had killed for memory where it runs, when it began.
    """

    incarnation: int
    info: EndpointInfo
    node: str
    node_rank: int | None = None
    device: str = ""
    log: str | None = None
    memory_kills: int = 0


@dataclass(frozen=True, slots=True)
class ExitReason:
    """The process is about to end by its own will: why. Answered, so that it does not end before that is known."""

    cause: str


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group, or a channel's process, is being launched by the sender. Answered with its incarnation."""

    name: str
    size: int
    channel: bool = False


@dataclass(frozen=True, slots=True)
class CloseGroup:
    """A group is shut down: its processes end now, and nobody shall take that for an accident.

    With an `incarnation` only this life of the group is meant: somebody may have launched another one under its name.
    """

    name: str
    incarnation: int | None = None


@dataclass(frozen=True, slots=True)
class Declare:
    """These groups are all that the job will have."""

    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answered with the info of a worker's endpoint as soon as it is there."""

    address: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody waits for the reply to this request any longer."""

    serial: int


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Answered with the number of workers of a group, as soon as it is being launched."""

    name: str


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """Answered at once with a `GroupLife`."""

    name: str


@dataclass(frozen=True, slots=True)
class GroupLife:
    """The present life of a group; `nodes` says where each worker runs, by rank, empty where that is not known."""

    incarnation: int
    nodes: tuple[str, ...]
    channel: bool = False


@dataclass(frozen=True, slots=True)
class WaitReport:
    """The operations that a process is in; sent while one has lasted for seconds."""

    publication: Publication


@dataclass(frozen=True, slots=True)
class Explain:
    """Answered with whom an operation of the sender waits for, in words; the publication has the operation."""

    serial: int
    publication: Publication


@dataclass(frozen=True, slots=True)
class Cancel:
    """Calls on these workers, by the ids that Ray gave them, are given up: whoever is in one shall be woken."""

    calls: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Dismiss:
    """The workers of this life of a group shall stop what they wait in: the group is shut down."""

    workers: tuple[str, ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class Inspect:
    """Answered with a `JobSnapshot`."""

    stacks: bool = False


@dataclass(frozen=True, slots=True)
class ManagerRequest:
    """One of the above that is answered."""

    serial: int
    body: object


@dataclass(frozen=True, slots=True)
class ProcessAnswer:
    """The answer of a process to a `Question`.

    Attributes:
        in_flight: workers that have not answered a call that it made.
        channels: the channels that live in it, by name.
        stacks: of its threads, in words, where they were asked for.
    """

    round: int
    publication: Publication
    in_flight: tuple[str, ...] = ()
    channels: Mapping[str, ChannelView] = field(default_factory=dict[str, ChannelView])
    stacks: str = ""


# From the manager to a process


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a request."""

    serial: int
    value: object = None
    error: PackedError | None = None


@dataclass(frozen=True, slots=True)
class NotYetNotice:
    """A lookup waits; for its first word."""

    serial: int
    message: str
    help: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """The question which operations a process is in."""

    round: int
    stacks: bool = False


@dataclass(frozen=True, slots=True)
class PostmortemQuestion:
    """The question what is left on a node of a process that died there. Answered with a `Postmortem`."""

    name: str
    hello: Hello


@dataclass(frozen=True, slots=True)
class Postmortem:
    """Why a process died, as far as its node tells."""

    name: str
    cause: str | None


@dataclass(frozen=True, slots=True)
class Died:
    """A worker that you have to do with is gone.

    Attributes:
        incarnation: which life of its group it belonged to.
        endpoint: the incarnation of its endpoint.
        node: where it ran, in words.
        vanished: whether its whole host is gone, or the way to it, so that Ray cannot tell of it soon.
    """

    address: str
    incarnation: int
    endpoint: str
    node: str | None
    cause: str | None
    vanished: bool = False


@dataclass(frozen=True, slots=True)
class Stuck:
    """Operations of yours are part of a deadlock, and shall fail."""

    serials: tuple[int, ...]
    members: tuple[str, ...]
    picture: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Calls that whoever made them gave up; None: all, for the group is shut down."""

    calls: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """All that the manager knows of its job at one moment, for who looks at it from outside.

    Attributes:
        job: its name.
        peers: the processes that are there, by address; the driver is `driver`.
        workers: those of groups and channels, by address, in order of launch and rank.
        dead: the dead, each with the seconds since.
        answers: what those that answered are in.
    """

    job: str
    peers: Mapping[str, Hello]
    workers: Mapping[str, WorkerRecord[EndpointInfo]]
    dead: Mapping[str, float]
    answers: Mapping[str, ProcessAnswer]


ToManager: TypeAlias = (
    Hello | CloseGroup | Declare | Forget | WaitReport | Cancel | Dismiss | ManagerRequest | ProcessAnswer | Postmortem
)
