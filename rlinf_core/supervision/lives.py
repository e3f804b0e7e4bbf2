"""The processes of a job: groups and workers, with their endpoints, incarnations and owners."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.errors import ChannelError, InvalidNameError, PeerNotFoundError, UnknownGroupError, WorkerDiedError
from rlinf_core.node.process_life import ProcessIdentity
from rlinf_core.suggest import did_you_mean

MANAGER: Final = "manager"
DRIVER: Final = "driver"
# The name prefix of inspectors outside of the job.
INSPECTOR: Final = "inspect"
# The exit reason of the process of a closed and drained channel.
CLOSED = "the channel was closed, and nothing was left in it"


class Life(StrEnum):
    """The stage of a worker's life."""

    LAUNCHING = "launching"
    READY = "ready"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """The record of one worker.

    Attributes:
        incarnation: the number of its launch, from 1; every launch of the group or of one of its workers increments it.
        node: a description of the node where it runs, once known.
        died_at: the time of its death, by the manager's monotonic clock.
    """

    address: WorkerAddress
    incarnation: int
    life: Life = Life.LAUNCHING
    info: EndpointInfo | None = None
    node: str | None = None
    cause: str | None = None
    died_at: float | None = None

    def died(self) -> WorkerDiedError:
        return WorkerDiedError(self.address.get_name(), node=self.node, cause=self.cause)


@dataclass(frozen=True, slots=True)
class GroupLife:
    """The current incarnation of a group.

    Attributes:
        nodes: descriptions of each worker's node, by rank; empty if unknown.
        channel: whether it is a channel's process.
        workers: each worker's incarnation, by rank.
        hosts: Ray's name of the actor that forwards each worker's calls, by rank; empty for none.
    """

    incarnation: int
    nodes: tuple[str, ...]
    channel: bool = False
    workers: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hello:
    """The registration of a process; the stream that it comes through gives its address.

    Attributes:
        incarnation: the incarnation of the worker; 0 for processes that are no workers.
        node: a description of the node where it runs, for example `node 1 (10.0.0.2)`.
        device: its device, for example `cuda:0`; empty for the CPU.
        log: the file of its standard error on its node, or None.
        host: Ray's name of the actor that forwards its calls; empty if it is an actor itself.
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


@dataclass(slots=True)
class _Group:
    incarnation: int
    size: int
    channel: bool = False
    workers: dict[int, WorkerRecord] = field(default_factory=dict[int, WorkerRecord])

    @property
    def alive(self) -> bool:
        return any(worker.life is not Life.DEAD for worker in self.workers.values())

    @property
    def closed(self) -> bool:
        return self.channel and any(worker.cause == CLOSED for worker in self.workers.values())


@dataclass(frozen=True, slots=True)
class NotYet:
    """The reason why a peer is not ready but may still be, with similar names if its group is unknown."""

    message: str
    help: str | None = None


class WorkerRegistry:
    """The groups and workers of one job.

    A group is known by the name of its address without the last rank: workers of a group that `env:0` launches have
    addresses `env:0:0`, `env:0:1`, ..., and their group is `env:0`.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._declared: frozenset[str] | None = None
        # The last incarnation of each name, kept after the group has ended: a relaunch must not reuse one.
        self._incarnations: dict[str, int] = {}

    # Groups

    def declare(self, groups: Iterable[str]) -> None:
        """Declare the groups that the job will have, so that other names fail at once.

        Declaring again adds names.
        """
        self._declared = (self._declared or frozenset()) | frozenset(groups)

    def open_group(self, name: str, size: int, *, channel: bool = False) -> int:
        """Register a group of `size` workers, or a channel's process, being launched; return its incarnation.

        Raises:
            InvalidNameError: the name is invalid, in use, or that of a closed channel, whose users must not reach
                another channel.
        """
        address = WorkerAddress.from_name(name)
        existing = self._groups.get(name)
        if existing is not None and existing.closed:
            raise InvalidNameError(f"a channel named `{name}` existed and is closed", help="choose another name")
        if existing is not None and existing.alive:
            if existing.channel:
                raise InvalidNameError(
                    f"a channel named `{name}` already exists",
                    help=f'choose another name, or use that channel: `Channel.connect("{name}")`',
                )
            raise InvalidNameError(
                f"a group named `{name}` is running",
                help="choose another name, or shut that group down first",
            )
        incarnation = self._incarnations.get(name, 0) + 1
        self._incarnations[name] = incarnation
        group: _Group = _Group(incarnation, size, channel)
        for rank in range(size):
            group.workers[rank] = WorkerRecord(address.get_child_address(rank), incarnation)
        self._groups[name] = group
        return incarnation

    def reopen(self, address: WorkerAddress) -> int:
        """Register a worker that is being launched in place of one that has ended; return its incarnation.

        Raises:
            PeerNotFoundError: there is no such worker.
        """
        if self.record(address) is None:
            raise PeerNotFoundError(str(address), f"there is no worker `{address}` to be launched again")
        name = _group_name(address)
        incarnation = self._incarnations[name] = self._incarnations[name] + 1
        self._store(WorkerRecord(address, incarnation))
        return incarnation

    def close_group(self, name: str) -> tuple[WorkerAddress, ...]:
        """Remove a group at its shutdown, which frees its name; return its workers."""
        group = self._groups.pop(name, None)
        return tuple(worker.address for worker in group.workers.values()) if group else ()

    def incarnation(self, name: str) -> int | None:
        """Return the current incarnation of a group; None if there is no such group."""
        group = self._groups.get(name)
        return group.incarnation if group else None

    def is_channel(self, name: str) -> bool:
        """Return whether there is a channel of this name, which may have ended."""
        group = self._groups.get(name)
        return group is not None and group.channel

    def groups(self) -> dict[str, int]:
        return {name: group.size for name, group in self._groups.items()}

    def workers(self, group: str) -> tuple[WorkerRecord, ...]:
        """Return the workers of a group by rank.

        Raises:
            UnknownGroupError: there is no such group.
        """
        workers = self._groups.get(group)
        if workers is None:
            raise UnknownGroupError(group, self._names())
        return tuple(workers.workers[rank] for rank in range(workers.size))

    # Workers

    def ready(self, address: WorkerAddress, incarnation: int, info: EndpointInfo, node: str | None = None) -> bool:
        """Record that a worker is reachable; return False for an earlier incarnation or a dead worker."""
        current = self._current(address, incarnation)
        if current is None or current.life is Life.DEAD:
            return False
        self._store(replace(current, life=Life.READY, info=info, node=node))
        return True

    def died(
        self, address: WorkerAddress, incarnation: int, now: float, *, node: str | None = None, cause: str | None = None
    ) -> bool:
        """Record that a worker's process is gone; return False if already known, or for an earlier incarnation.

        A later call adds a node or cause that was unknown.
        """
        current = self._current(address, incarnation)
        if current is None:
            return False
        news = current.life is not Life.DEAD
        self._store(
            replace(
                current,
                life=Life.DEAD,
                info=None,
                node=current.node or node,
                cause=current.cause or cause,
                died_at=now if news else current.died_at,
            )
        )
        return news

    def look_up(self, address: WorkerAddress, *, channel: bool = False) -> WorkerRecord | NotYet:
        """Return a worker, or with `channel` a channel's process, that is ready, or why it is not ready yet.

        Raises:
            UnknownGroupError: the job declared its groups, and this is not one of them.
            PeerNotFoundError: the group has no such rank, or it is a channel.
            ChannelError: the channel is a worker group.
            WorkerDiedError: the worker is dead.
        """
        name = address.get_name()
        if not address.ranks:
            raise PeerNotFoundError(name, f"`{name}` is a group, not a worker", help=f"name a rank, as in `{name}:0`")
        group_name = _group_name(address)
        group = self._groups.get(group_name)
        if group is None:
            return self._unknown(group_name, address)
        if channel and not group.channel:
            help = "connect to the name that the channel was created with"
            raise ChannelError(group_name, f"`{group_name}` is a worker group, not a channel", help=help)
        if group.channel and not channel:
            help = f'use `connect_channel("{group_name}")`'
            raise PeerNotFoundError(name, f"`{group_name}` is a channel, not a worker group", help=help)
        worker = group.workers.get(address.rank)
        if worker is None:
            raise PeerNotFoundError(
                name,
                f"`{group_name}` has no rank {address.rank}",
                why=f"it has {group.size} workers, ranks 0 to {group.size - 1}",
            )
        if worker.life is Life.DEAD:
            raise worker.died()
        if worker.life is Life.LAUNCHING:
            return NotYet(f"`{name}` is launching")
        return worker

    # Inside

    def _names(self) -> tuple[str, ...]:
        return tuple(sorted(self._groups.keys() | (self._declared or frozenset())))

    def _unknown(self, group: str, address: WorkerAddress) -> NotYet:
        # Only top-level groups are declared; groups of workers are known when launched.
        if self._declared is not None and address.root_group_name not in self._names():
            raise UnknownGroupError(group, self._names())
        if group in (self._declared or ()):
            return NotYet(f"the group `{group}` is declared but not launched yet")
        return NotYet(f"no group is named `{group}`; it may still be launched", did_you_mean(group, self._names()))

    def _store(self, record: WorkerRecord) -> None:
        self._groups[_group_name(record.address)].workers[record.address.rank] = record

    def record(self, address: WorkerAddress) -> WorkerRecord | None:
        """Return the record of a worker, or None."""
        if not address.ranks:
            return None
        group = self._groups.get(_group_name(address))
        return group.workers.get(address.rank) if group else None

    def _current(self, address: WorkerAddress, incarnation: int) -> WorkerRecord | None:
        current = self.record(address)
        return current if current is not None and current.incarnation == incarnation else None


def _group_name(address: WorkerAddress) -> str:
    return WorkerAddress(address.root_group_name, address.ranks[:-1]).get_name()


class Ownership:
    """The groups of a job, each with its owner: the worker or driver that launched it."""

    def __init__(self) -> None:
        # In the order of their launch.
        self._owners: dict[str, str] = {}

    def claim(self, group: str, owner: str) -> None:
        self._owners.pop(group, None)
        self._owners[group] = owner

    def release(self, group: str) -> None:
        self._owners.pop(group, None)

    def gone(self, owner: str) -> tuple[str, ...]:
        """Return and forget the groups to end after a worker has died: newest first, so inner before outer.

        They are the groups that it launched, and transitively those that their workers launched.
        """
        doomed: set[str] = set()
        parents = [owner]
        while parents:
            parent = parents.pop()
            children = {
                group for group, by in self._owners.items() if by == parent or by.startswith(f"{parent}:")
            } - doomed
            doomed |= children
            parents += children
        order = tuple(group for group in reversed(self._owners) if group in doomed)
        for group in order:
            del self._owners[group]
        return order
