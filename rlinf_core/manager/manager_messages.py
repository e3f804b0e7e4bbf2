"""The messages between the manager and the processes of a job.

A `ManagerRequest` is answered by a `Reply` with the same serial, a `Question` by a `ProcessAnswer`; other messages have
no answer. All are exchanged between authenticated endpoints of the same rlinf, so plain pickled values suffice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.errors import ProcessEnd
from rlinf_core.failures import PackedError
from rlinf_core.manager.wait_edges import ChannelView
from rlinf_core.manager.worker_registry import WorkerRecord
from rlinf_core.node.process_identity import ProcessIdentity
from rlinf_core.node.stacks.process_stacks import ProcessStacks, StackRequest
from rlinf_core.waiting import Publication

# The endpoint's service tag for these messages; channels use small numbers.
CONTROL = 60_000
MANAGER = "manager"
DRIVER = "driver"
# The name prefix of inspectors from outside of the job.
INSPECTOR = "inspect"


# From a process to the manager


@dataclass(frozen=True, slots=True)
class Hello:
    """A process registers; its address is the connection's.

    Attributes:
        incarnation: the incarnation of the worker; 0 for non-workers.
        node: where it runs, in words, as in `node 1 (10.0.0.2)`.
        device: its device, as in `cuda:0`; empty for the CPU.
        log: the file of its standard error on its node, or None.
        host: Ray's name of the actor that passes its calls on; empty for one that is an actor itself.
        process: its identity on its machine.
    """

    incarnation: int
    info: EndpointInfo
    node: str
    node_rank: int | None = None
    device: str = ""
    log: str | None = None
    host: str = ""
    process: ProcessIdentity | None = None


@dataclass(frozen=True, slots=True)
class ExitReason:
    """Why the sender, or the process `name`, is about to be ended deliberately. Answered, so that this is known before
    it ends."""

    cause: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """The sender launches a group or a channel's process. Answered with its incarnation."""

    name: str
    size: int
    channel: bool = False


@dataclass(frozen=True, slots=True)
class ReopenWorker:
    """The sender launches a worker in place of one that has died. Answered with its incarnation."""

    address: str


@dataclass(frozen=True, slots=True)
class CloseGroup:
    """Announces a group's shutdown; later exits are expected.

    With an `incarnation`, only that one is shut down: another group may have been launched under the name.
    """

    name: str
    incarnation: int | None = None


@dataclass(frozen=True, slots=True)
class Declare:
    """Declares all groups that the job will have."""

    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answered with the info of a worker's endpoint once it is registered."""

    address: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Cancels a request: its sender no longer waits for the reply."""

    serial: int


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Answered with the number of workers of a group, once its launch has begun."""

    name: str


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """Answered at once with a `GroupLife`."""

    name: str


@dataclass(frozen=True, slots=True)
class GroupLife:
    """The current incarnation of a group.

    Attributes:
        nodes: each worker's node, by rank; empty if unknown.
        channel: whether it is a channel's process.
        workers: each worker's incarnation, by rank.
        hosts: Ray's name of the actor that passes each worker's calls on, by rank; empty for none.
    """

    incarnation: int
    nodes: tuple[str, ...]
    channel: bool = False
    workers: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitReport:
    """The current operations of a process; sent while one has lasted for seconds."""

    publication: Publication


@dataclass(frozen=True, slots=True)
class Explain:
    """Answered with a description of the peers that an operation of the sender waits for; the publication has the
    operation."""

    serial: int
    publication: Publication


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancels calls on workers, by Ray's ids: workers in such a call are woken."""

    calls: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Interrupts the waits of a group's workers for its shutdown; `workers` holds their incarnations, by address."""

    workers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Inspect:
    """Answered with a `JobSnapshot`."""

    stacks: bool = False


@dataclass(frozen=True, slots=True)
class ReadStacks:
    """Asks for the stacks of a process, and of those that it started, read from outside by another one of its node.

    Answered with a list of `ProcessStacks`.

    Attributes:
        name: the process.
        helper: the process that reads them; `name` itself may read those of the processes that it started.
        own, native: the names and native, as in `StackRequest`.
    """

    name: str
    helper: str
    own: bool
    native: bool


@dataclass(frozen=True, slots=True)
class BreakpointWait:
    """The sender waits at a breakpoint.

    Attributes:
        place: the place of the breakpoint, as in `recipes/x.py:12`; None once it continues.
        attached: whether somebody steps through it already.
    """

    place: str | None
    attached: bool = False


@dataclass(frozen=True, slots=True)
class PausedSeconds:
    """Answered with the number of the last `seconds` in which any process waited at a breakpoint."""

    seconds: float


@dataclass(frozen=True, slots=True)
class StoreRead:
    """Answered with the value of each key in the store of the sender's group, or None where it has none.

    Attributes:
        wait: whether the answer waits until all are there.
    """

    keys: tuple[str, ...]
    wait: bool


@dataclass(frozen=True, slots=True)
class StoreWrite:
    """Answered with the new value in the store of the sender's group, or with the removed one.

    Attributes:
        value: the value; a number to add to the one that is there; None removes it.
    """

    key: str
    value: bytes | int | None


@dataclass(frozen=True, slots=True)
class ManagerRequest:
    """A wrapper for requests that are answered."""

    serial: int
    body: object


@dataclass(frozen=True, slots=True)
class ProcessAnswer:
    """The answer of a process to a `Question`.

    Attributes:
        in_flight: workers with unanswered calls of this process.
        channels: the channels it hosts, by name.
        stacks: the stacks of its threads, as text, if requested.
        recent: what it did in the last 30 s, likewise.
        recipients: the processes to which messages of it are on their way, by incarnation; by name in the manager.
    """

    round: int
    publication: Publication
    in_flight: tuple[str, ...] = ()
    channels: Mapping[str, ChannelView] = field(default_factory=dict[str, ChannelView])
    stacks: str = ""
    recent: str = ""
    recipients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StacksRead:
    """The answer to a `StackQuestion`, or why there is none."""

    serial: int
    stacks: list[ProcessStacks] = field(default_factory=list[ProcessStacks])
    error: PackedError | None = None


# From the manager to a process


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a request."""

    serial: int
    value: object = None
    error: PackedError | None = None


@dataclass(frozen=True, slots=True)
class NotYetNotice:
    """Progress notice of a blocked lookup."""

    serial: int
    message: str
    help: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """Asks a process for its current operations."""

    round: int
    stacks: bool = False


@dataclass(frozen=True, slots=True)
class StackQuestion:
    """Asks for the stacks of a process on the receiver's node. Answered with `StacksRead`."""

    serial: int
    request: StackRequest


@dataclass(frozen=True, slots=True)
class AtBreakpoint:
    """A notice to the driver that a process waits at a breakpoint."""

    name: str
    place: str


@dataclass(frozen=True, slots=True)
class PostmortemQuestion:
    """Asks for the cause of death of a process on the receiver's node. Answered with a `Postmortem`."""

    name: str
    hello: Hello


@dataclass(frozen=True, slots=True)
class Postmortem:
    """Why a process died, as far as known on its node."""

    name: str
    cause: str | None


@dataclass(frozen=True, slots=True)
class Died:
    """Announces the death of an acquainted worker.

    Attributes:
        incarnation: the incarnation of the worker.
        endpoint: the incarnation of its endpoint.
        node: where it ran, in words.
        vanished: whether its host is gone or unreachable, so that Ray will report it late.
        end: how its process ended, or None if unknown.
    """

    address: str
    incarnation: int
    endpoint: str
    node: str | None
    cause: str | None
    vanished: bool = False
    end: ProcessEnd | None = None


@dataclass(frozen=True, slots=True)
class Stuck:
    """Fails operations of the receiver that are part of a deadlock."""

    serials: tuple[int, ...]
    members: tuple[str, ...]
    picture: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Calls cancelled by their callers; None for all, at the group's shutdown."""

    calls: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """A snapshot of the manager's data, for inspection from outside.

    Attributes:
        job: its name.
        peers: the registered processes, by address; the driver is `driver`.
        workers: those of groups and channels, by address, in order of launch and rank.
        dead: the dead, each with the seconds since.
        answers: the current operations of those that answered.
    """

    job: str
    peers: Mapping[str, Hello]
    workers: Mapping[str, WorkerRecord[EndpointInfo]]
    dead: Mapping[str, float]
    answers: Mapping[str, ProcessAnswer]


ToManager: TypeAlias = (
    Hello
    | CloseGroup
    | Declare
    | Forget
    | WaitReport
    | Cancel
    | Dismiss
    | ManagerRequest
    | ProcessAnswer
    | Postmortem
    | StacksRead
    | BreakpointWait
)
