"""The manager of a job: registers its processes, announces deaths, and detects deadlocks.

A single thread runs the methods that processes call, in order, so nothing here needs a lock. The registry, the
ownership and the wait-for graph make the decisions; this file does the messaging.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.collective.handshake import ClusterSecret
from rlinf_core.errors import RLinfError, RuntimeFailure, UnknownGroupError
from rlinf_core.failures import SHUT_DOWN, PackedError
from rlinf_core.node.stacks import StackRequest
from rlinf_core.supervision.deaths import DeathCauses, Died, Peer
from rlinf_core.supervision.job_view import JobSnapshot
from rlinf_core.supervision.lives import (
    DRIVER,
    INSPECTOR,
    GroupLife,
    Hello,
    Life,
    NotYet,
    Ownership,
    WorkerRecord,
    WorkerRegistry,
)
from rlinf_core.supervision.rank_stores import RankStores
from rlinf_core.supervision.rpc import LATER, Caller, Reply, Rpc
from rlinf_core.supervision.wait_graph import Deadlock
from rlinf_core.supervision.waits import Pauses, ProcessAnswer, Round, Watch
from rlinf_core.waiting import Publication

_log = logging.getLogger(__name__)
# Seconds between ticks, while something is due soon, and otherwise.
_SLICE = 0.05
_IDLE = 3600.0


@dataclass(slots=True)
class _Pending:
    """A lookup that waits: of a worker or a channel's process, or of the size of a group."""

    caller: Caller
    name: str
    size: bool = False
    channel: bool = False
    # The last notice sent to the caller.
    said: str = ""

    @property
    def group(self) -> str:
        return self.name if self.size else self.name.rpartition(":")[0]


class Manager:
    """The manager of one job. Processes call its methods without an underscore."""

    def __init__(
        self, endpoint: Endpoint, job: str, rpc: type[Rpc] = Rpc, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._job, self._clock, self._place = job, clock, endpoint.info.place
        self._registry = WorkerRegistry()
        self._ownership = Ownership()
        self._peers: dict[str, Peer] = {}
        self._pending: list[_Pending] = []
        self._watch = Watch(self._ask, self._end, self._dead, clock)
        self._causes = DeathCauses(self._place, self._read_log, self._conclude, clock)
        self._pauses = Pauses(clock)
        self._stores = RankStores(lambda caller, value: self._rpc.answer(caller, value))
        methods = {name: getattr(self, name) for name in vars(Manager) if not name.startswith("_")}
        methods |= {"read_store": self._stores.read, "write_store": self._stores.write}
        self._rpc = rpc(endpoint, methods, self._tick, self._seconds_to_tick)
        endpoint.on_peer_lost(lambda peer, reason: self._rpc.soon(partial(self._lost, peer, reason)))

    def _tell(self, name: str, method: str, *args: object) -> None:
        peer = self._peers.get(name)
        if peer is not None:
            self._rpc.tell(peer.stream, method, *args)

    # Registration

    def hello(self, caller: Caller, hello: Hello) -> None:
        """Register a process."""
        address = WorkerAddress.from_name(caller.name)
        if address.ranks and not self._registry.ready(address, hello.incarnation, hello.info, hello.node):
            return  # a late message from an earlier incarnation
        self._peers[caller.name] = Peer(caller.name, caller.stream, hello)
        if address.ranks:
            self._causes.watch(caller.name, hello)
        self._retry_pending()

    def exit_reason(self, caller: Caller, cause: str, name: str = "") -> None:
        """Record why the caller, or the process `name`, is about to end deliberately."""
        peer = self._peers.get(name or caller.name)
        if peer is not None:
            peer.exit_reason = cause

    def open_group(self, caller: Caller, name: str, size: int, channel: bool) -> int:
        """Register a group or a channel's process that the caller launches; return its incarnation."""
        incarnation = self._registry.open_group(name, size, channel=channel)
        self._stores.drop(name)
        if not channel:
            self._ownership.claim(name, caller.name)
        self._retry_pending()
        return incarnation

    def reopen(self, caller: Caller, name: str) -> int:
        """Register a worker that the caller launches in place of one that has died; return its incarnation."""
        if name in self._peers:
            # Its launcher ended it, or learned of its death before its connection to the manager ended.
            self._lost(name, "its process has ended")
        # Conclude now: the news of this death must not come after the launch of the successor.
        self._causes.hurry(name)
        return self._registry.reopen(WorkerAddress.from_name(name))

    def close_group(self, caller: Caller, name: str, incarnation: int | None) -> None:
        """End a group, unless it has another incarnation than given: later exits of its workers are expected."""
        if incarnation in (None, self._registry.incarnation(name)):
            self._end_group(name)

    def _end_group(self, name: str) -> None:
        for address in map(str, self._registry.close_group(name)):
            peer = self._peers.pop(address, None)
            self._causes.drop(address)
            if peer is not None:
                self._announce_death(peer, peer.died(SHUT_DOWN))
        self._stores.drop(name)
        self._ownership.release(name)

    def declare(self, caller: Caller, groups: tuple[str, ...]) -> None:
        """Declare groups that the job will have."""
        self._registry.declare(groups)
        self._retry_pending()

    # Lookups

    def lookup(self, caller: Caller, name: str, channel: bool) -> object:
        """Return the endpoint of a worker, or of a channel's process, once it is registered."""
        return self._look_up(_Pending(caller, name, channel=channel))

    def group_size(self, caller: Caller, name: str) -> object:
        """Return the number of workers of a group, once its launch has begun."""
        return self._look_up(_Pending(caller, name, size=True))

    def group_life(self, caller: Caller, name: str) -> GroupLife:
        """Return the current incarnation of a group."""
        workers = self._registry.workers(name)
        peers = (self._peers.get(str(worker.address)) for worker in workers)
        return GroupLife(
            self._registry.incarnation(name) or 0,
            tuple(worker.node or "" for worker in workers),
            self._registry.is_channel(name),
            tuple(worker.incarnation for worker in workers),
            tuple(peer.hello.host if peer is not None else "" for peer in peers),
        )

    def forget(self, caller: Caller, serial: int) -> None:
        """Drop a lookup or a read of the caller, which no longer waits for the reply."""
        self._stores.forget(caller.stream, serial)
        self._pending = [one for one in self._pending if one.caller != (caller.stream, serial)]

    def _look_up(self, pending: _Pending) -> object:
        """Return the result of a lookup, or `LATER` if it must wait."""
        peer = self._find(pending)
        if not isinstance(peer, NotYet):
            return peer
        self._pending.append(pending)
        if peer.message != pending.said:
            pending.said = peer.message
            self._rpc.tell(pending.caller.stream, "not_yet", pending.caller.serial, peer.message, peer.help)
        return LATER

    def _find(self, pending: _Pending) -> EndpointInfo | int | NotYet:
        if pending.size:
            size = self._registry.groups().get(pending.name)
            if size is not None:
                return size
            record = self._registry.look_up(WorkerAddress.from_name(f"{pending.name}:0"))
            return record if isinstance(record, NotYet) else 0
        for name, partner in ((pending.caller.name, pending.name), (pending.name, pending.caller.name)):
            if name in self._peers:
                self._peers[name].acquaintances.add(partner)
        record = self._registry.look_up(WorkerAddress.from_name(pending.name), channel=pending.channel)
        if isinstance(record, NotYet):
            return record
        return record.info or NotYet(f"`{pending.name}` is launching")

    def _retry_pending(self) -> None:
        waiting, self._pending = self._pending, []
        for pending in waiting:
            try:
                answer = self._look_up(pending)
            except RLinfError as error:
                self._rpc.answer(pending.caller, error=PackedError.of(error.with_traceback(None)))
            else:
                if answer is not LATER:
                    self._rpc.answer(pending.caller, answer)

    # Calls that are no longer wanted

    def cancel(self, caller: Caller, calls: Mapping[str, tuple[str, ...]]) -> None:
        """Wake the workers in calls that their caller has cancelled, by Ray's ids."""
        for name, serials in calls.items():
            self._tell(name, "cancelled", serials)

    def dismiss(self, caller: Caller, workers: Mapping[str, int]) -> None:
        """Interrupt all waits of workers with these incarnations, for the shutdown of their group."""
        for name, incarnation in workers.items():
            peer = self._peers.get(name)
            if peer is not None and peer.hello.incarnation == incarnation:
                self._rpc.tell(peer.stream, "cancelled", None)

    # Deaths

    def _lost(self, name: str, reason: str) -> None:
        self._pending = [lookup for lookup in self._pending if lookup.caller.name != name]
        peer = self._peers.pop(name, None)
        self._watch.left(name)
        self._rpc.lost(name, RuntimeFailure(f"`{name}` has ended"))
        self._pauses.end(name)
        address = WorkerAddress.from_name(name)
        if peer is None or not address.ranks:
            return
        if not self._registry.died(address, peer.hello.incarnation, self._clock(), node=peer.hello.node):
            return
        for group in self._ownership.gone(name):
            self._end_group(group)
        self._causes.search(peer, reason)

    def _read_log(self, peer: Peer, take: Callable[[Reply], object]) -> None:
        """Make another process of a dead one's node read its log."""
        place = peer.hello.info.place
        neighbour = next((other for other in self._peers.values() if other.hello.info.place == place), None)
        if neighbour is not None:
            call = self._rpc.call("exit_reason", peer.hello.log)
            self._rpc.ask(neighbour.stream, call, partial(self._in_thread, take))

    def _in_thread(self, function: Callable[[Reply], object], reply: Reply) -> None:
        self._rpc.soon(partial(function, reply))

    def _conclude(self, peer: Peer, died: Died) -> None:
        address = WorkerAddress.from_name(peer.name)
        self._registry.died(address, died.incarnation, self._clock(), cause=died.cause)
        self._announce_death(peer, died)
        # Pending lookups of the dead worker now fail.
        self._retry_pending()

    def _announce_death(self, peer: Peer, died: Died) -> None:
        for name in sorted({*peer.acquaintances, DRIVER}):
            self._tell(name, "died", died)

    # Waits

    def _seconds_to_tick(self) -> float:
        return _SLICE if self._causes.searching or self._watch.busy else _IDLE

    def _tick(self) -> None:
        self._causes.tick()
        self._watch.unknown = frozenset(lookup.name for lookup in self._pending if self._is_unknown(lookup))
        for deadlock in self._watch.tick():
            if self._refuse_unknown(deadlock):
                continue
            _log.warning("deadlock among %s: %s", ", ".join(deadlock.members), deadlock.picture)
            for name in deadlock.members:
                serials = tuple(serial for owner, serial in deadlock.operations if owner == name)
                self._tell(name, "stuck", serials, deadlock.members, deadlock.picture)

    def _is_unknown(self, pending: _Pending) -> bool:
        """Return whether a lookup waits for the name of a group or channel that does not exist."""
        return self._registry.incarnation(pending.group) is None

    def _refuse_unknown(self, deadlock: Deadlock) -> bool:
        """Fail the lookups of unknown names by members of a deadlock, for good; return whether there are any."""
        hopeless = [
            lookup for lookup in self._pending if lookup.caller.name in deadlock.members and self._is_unknown(lookup)
        ]
        self._pending = [lookup for lookup in self._pending if lookup not in hopeless]
        for pending in hopeless:
            error = UnknownGroupError(pending.group, tuple(self._registry.groups()), where=pending.caller.name)
            self._rpc.answer(pending.caller, error=PackedError.of(error))
        return bool(hopeless)

    def _ask(self, round_: Round) -> None:
        """Ask all processes of the job for their current operations."""
        for name, peer in self._inside():
            call = self._rpc.call("observe", round_.stacks)
            round_.asked.add(name)
            round_.calls.append(call.serial)
            self._rpc.ask(peer.stream, call, partial(self._in_thread, partial(self._observed, round_, name)))

    def _end(self, round_: Round) -> None:
        self._rpc.forget(*round_.calls)

    def _observed(self, round_: Round, name: str, reply: Reply) -> None:
        if reply.error is not None:
            return
        answer: ProcessAnswer = reply.value
        if answer.recipients:
            names = {peer.hello.info.incarnation: name for name, peer in self._peers.items()}
            recipients = tuple(names[incarnation] for incarnation in answer.recipients if incarnation in names)
            answer = replace(answer, recipients=recipients)
        round_.answers[name] = answer

    def _dead(self) -> dict[str, float]:
        now = self._clock()
        return {
            name: now - (worker.died_at or now) for name, worker in self._workers().items() if worker.life is Life.DEAD
        }

    def waits_long(self, caller: Caller) -> None:
        """Start checking for deadlocks, since the caller has waited for long."""
        self._watch.alarm()

    def explain(self, caller: Caller, serial: int, publication: Publication) -> object:
        """Return a description of the peers that an operation of the caller, in `publication`, waits for."""

        def answer(round_: Round) -> None:
            round_.answers[caller.name] = ProcessAnswer(publication)
            self._rpc.answer(caller, round_.graph(self._dead()).explain(caller.name, serial))

        self._watch.begin(answer)
        return LATER

    # Inspection

    def snapshot(self, caller: Caller, stacks: bool) -> object:
        """Return the current operations of all processes, with the stacks of their threads if wanted."""

        def answer(round_: Round) -> None:
            hellos = {name: peer.hello for name, peer in self._inside()}
            self._rpc.answer(caller, JobSnapshot(self._job, hellos, self._workers(), self._dead(), round_.answers))

        self._watch.begin(answer, stacks=stacks)
        return LATER

    def read_stacks(self, caller: Caller, helper: str, request: StackRequest) -> object:
        """Return the stacks of a process, read by `helper`; only those of processes known to this manager."""
        peers = dict(self._inside())
        if helper not in peers or all(peer.hello.process != request.process for peer in peers.values()):
            raise RuntimeFailure(f"process {request.process.pid} or `{helper}` has ended")
        call = self._rpc.call("answer_stacks", request)
        self._rpc.ask(peers[helper].stream, call, lambda reply: self._rpc.answer(caller, reply.value, reply.error))
        return LATER

    def stops_at(self, caller: Caller, place: str | None, attached: bool) -> None:
        """Record and report to the driver that the caller waits at a breakpoint; with None, that it continues."""
        if place is None:
            self._pauses.end(caller.name)
        else:
            self._pauses.begin(caller.name)
            if not attached:
                self._tell(DRIVER, "at_breakpoint", caller.name, place)

    def paused(self, caller: Caller, seconds: float) -> float:
        """Return the number of the last `seconds` in which any process waited at a breakpoint."""
        return self._pauses.within(seconds)

    def _inside(self) -> Iterable[tuple[str, Peer]]:
        """Return the processes of the job, without inspectors, which unlike workers have no rank."""
        return ((name, peer) for name, peer in self._peers.items() if ":" in name or not name.startswith(INSPECTOR))

    def _workers(self) -> dict[str, WorkerRecord]:
        return {
            str(worker.address): worker for group in self._registry.groups() for worker in self._registry.workers(group)
        }


class ManagerProcess:
    """The manager's Ray actor, one per job. Messages between workers do not pass through it.

    Args:
        ip: the address at which other nodes reach this one; None for `RLINF_NET_IF`.
        folder: the private folder, for sockets, of the driver that started this machine's Ray; None if none did.
    """

    def __init__(self, job: str, secret: bytes, ip: str | None, folder: str | None) -> None:
        self._job = job
        self._secret = secret
        self._started = time.time()
        self._endpoint = Endpoint(ClusterSecret(secret), ip=ip, directory=folder)
        self._manager = Manager(self._endpoint, job)

    def __repr__(self) -> str:
        """Return Ray's prefix for lines that this process prints."""
        return "manager"

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`, run in this process, so that actors it creates live as long as the job."""
        return function(*args)

    def record(self) -> tuple[str, str, EndpointInfo, float]:
        """Return, for inspectors, the job's name, its secret in hex, the manager's endpoint, and its start (epoch)."""
        return self._job, self._secret.hex(), self._endpoint.info, self._started

    def info(self) -> EndpointInfo:
        return self._endpoint.info
