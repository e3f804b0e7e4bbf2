"""The manager of a job: registers its processes, announces deaths, and detects deadlocks.

A single thread handles the messages in order, so nothing here needs a lock. The registry, the ownership and the
wait-for graph make the decisions; this file does the messaging.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.connections.connection import NO_ANSWER
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.errors import ProcessEnd, RLinfError, UnknownGroupError
from rlinf_core.failures import PackedError
from rlinf_core.manager import manager_messages as m
from rlinf_core.manager import postmortem
from rlinf_core.manager.control_rpc import ControlRpc, expect
from rlinf_core.manager.debugging import Debugging
from rlinf_core.manager.rank_stores import RankStores
from rlinf_core.manager.wait_graph import Deadlock
from rlinf_core.manager.watch import Round, Watch
from rlinf_core.manager.worker_registry import Life, NotYet, Ownership, WorkerRecord, WorkerRegistry
from rlinf_core.node.process_end import EndWatch

_log = logging.getLogger(__name__)
# Seconds between ticks, while something is due soon, and otherwise.
_SLICE = 0.05
_IDLE = 3600.0
# Seconds for another process on a dead one's node to report its cause of death.
_POSTMORTEM_SECONDS = 0.5


@dataclass(slots=True)
class Peer:
    """A registered process."""

    name: str
    stream: PeerStream
    hello: m.Hello
    exit_reason: str | None = None
    # Processes that it has looked up, and that have looked it up.
    acquaintances: set[str] = field(default_factory=set[str])


@dataclass(slots=True)
class _Pending:
    stream: PeerStream
    serial: int
    name: str
    sizes_only: bool = False
    # The last notice that its process was sent.
    said: str = ""


@dataclass(slots=True)
class _Death:
    peer: Peer
    until: float


class Manager:
    """The registry of one job, and the watch over its waits.

    Args:
        control: exchanges the messages, see `ControlRpc`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        job: str,
        control: type[ControlRpc] = ControlRpc,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._clock = clock
        self._info = endpoint.info
        self._registry: WorkerRegistry[EndpointInfo] = WorkerRegistry()
        self._ownership = Ownership()
        self._peers: dict[str, Peer] = {}
        self._pending: list[_Pending] = []
        self._deaths: dict[str, _Death] = {}
        self._watch = Watch(clock)
        self._ends = EndWatch()
        self._stores = RankStores(self._reply)
        self._debugging = Debugging(self._send, self._reply, self._refuse, self._hellos, clock)
        self._handlers: dict[type, Callable[[PeerStream, Any], None]] = {
            m.Hello: self._hello,
            m.CloseGroup: self._close_group,
            m.Declare: self._declare,
            m.Forget: self._forget,
            m.WaitReport: self._report,
            m.Cancel: self._cancel,
            m.Dismiss: self._dismiss,
            m.ManagerRequest: self._request,
            m.ProcessAnswer: self._answer,
            m.Postmortem: self._take_postmortem,
            m.StacksRead: self._debugging.stacks_read,
            m.BreakpointWait: self._debugging.breakpoint,
        }
        self._control = control(endpoint, self._handle, self._tick, self._free_for)
        endpoint.on_peer_lost(lambda peer, reason: self._control.put(_Lost(peer, reason)))

    def _free_for(self) -> float:
        return _SLICE if self._deaths or self._watch.busy else _IDLE

    def _handle(self, stream: PeerStream | None, message: object) -> None:
        if stream is None:
            self._lost(expect(message, _Lost))
        else:
            self._handlers[type(message)](stream, message)

    def _send(self, name: str, message: object) -> None:
        peer = self._peers.get(name)
        if peer is not None:
            self._control.send(peer.stream, message)

    # Registration

    def _hello(self, stream: PeerStream, hello: m.Hello) -> None:
        address = WorkerAddress.from_name(stream.peer)
        if address.ranks and not self._registry.ready(address, hello.incarnation, hello.info, hello.node):
            return  # a late message from an earlier incarnation
        self._peers[stream.peer] = Peer(stream.peer, stream, hello)
        if address.ranks and hello.info.place == self._info.place:
            self._ends.watch(stream.peer, hello.info.pid)
        self._retry_pending()

    def _take_exit_reason(self, stream: PeerStream, reason: m.ExitReason) -> None:
        peer = self._peers.get(reason.name or stream.peer)
        if peer is not None:
            peer.exit_reason = reason.cause

    def _open_group(self, stream: PeerStream, message: m.OpenGroup) -> int:
        incarnation = self._registry.open_group(message.name, message.size, channel=message.channel)
        self._stores.drop(message.name)
        if not message.channel:
            self._ownership.claim(message.name, stream.peer)
        self._retry_pending()
        return incarnation

    def _reopen(self, reopened: m.ReopenWorker) -> int:
        name = reopened.address
        if name in self._peers:
            # Its launcher ended it, or heard of its death before its connection ended.
            self._lost(_Lost(name, "its process has ended"))
        death = self._deaths.pop(name, None)
        if death is not None:
            # At once: the news must not reach anybody after that of its successor.
            self._look_at_end(death, last=True)
        return self._registry.reopen(WorkerAddress.from_name(name))

    def _close_group(self, stream: PeerStream, closed: m.CloseGroup) -> None:
        if closed.incarnation in (None, self._registry.incarnation(closed.name)):
            self._end_group(closed.name)

    def _end_group(self, name: str) -> None:
        for address in self._registry.close_group(name):
            peer = self._peers.pop(str(address), None)
            self._deaths.pop(str(address), None)
            self._ends.drop(str(address))
            if peer is not None:
                self._announce_death(peer, "its group was shut down")
        self._stores.drop(name)
        self._ownership.release(name)

    def _declare(self, stream: PeerStream, declared: m.Declare) -> None:
        self._registry.declare(declared.groups)
        self._retry_pending()

    # Requests

    def _request(self, stream: PeerStream, request: m.ManagerRequest) -> None:
        body = request.body
        try:
            if isinstance(body, m.OpenGroup):
                self._reply(stream, request.serial, self._open_group(stream, body))
            elif isinstance(body, m.ReopenWorker):
                self._reply(stream, request.serial, self._reopen(body))
            elif isinstance(body, m.Lookup):
                self._try_pending(_Pending(stream, request.serial, body.address))
            elif isinstance(body, m.GroupSize):
                self._try_pending(_Pending(stream, request.serial, body.name, sizes_only=True))
            elif isinstance(body, m.GroupMembers):
                workers = self._registry.workers(body.name)
                nodes = tuple(worker.node or "" for worker in workers)
                lives = tuple(worker.incarnation for worker in workers)
                incarnation = self._registry.incarnation(body.name) or 0
                peers = (self._peers.get(str(worker.address)) for worker in workers)
                hosts = tuple(peer.hello.host if peer is not None else "" for peer in peers)
                life = m.GroupLife(incarnation, nodes, self._registry.is_channel(body.name), lives, hosts)
                self._reply(stream, request.serial, life)
            elif isinstance(body, m.ExitReason):
                self._reply(stream, request.serial, self._take_exit_reason(stream, body))
            elif isinstance(body, m.Explain):
                self._explain(stream, request.serial, body)
            elif isinstance(body, m.Inspect):
                self._inspect(stream, request.serial, body)
            elif isinstance(body, m.StoreRead):
                self._stores.read(stream, request.serial, body)
            elif isinstance(body, m.StoreWrite):
                self._stores.write(stream, request.serial, body)
            elif isinstance(body, m.ReadStacks):
                self._debugging.read_stacks(stream, request.serial, body)
            elif isinstance(body, m.PausedSeconds):
                self._reply(stream, request.serial, self._debugging.pauses.within(body.seconds))
        except RLinfError as error:
            self._refuse(stream, request.serial, error)

    def _reply(self, stream: PeerStream, serial: int, value: object) -> None:
        self._control.send(stream, m.Reply(serial, value))

    def _refuse(self, stream: PeerStream, serial: int, error: Exception) -> None:
        self._control.send(stream, m.Reply(serial, error=PackedError.of(error)))

    def _try_pending(self, pending: _Pending) -> None:
        try:
            peer = self._find(pending)
        except RLinfError as error:
            self._refuse(pending.stream, pending.serial, error)
            return
        if isinstance(peer, NotYet):
            self._pending.append(pending)
            if peer.message != pending.said:
                pending.said = peer.message
                self._control.send(pending.stream, m.NotYetNotice(pending.serial, peer.message, peer.help))
            return
        self._reply(pending.stream, pending.serial, peer)

    def _find(self, pending: _Pending) -> EndpointInfo | int | NotYet:
        if pending.sizes_only:
            size = self._registry.groups().get(pending.name)
            if size is not None:
                return size
            group_info = self._registry.look_up(WorkerAddress.from_name(f"{pending.name}:0"))
            return group_info if isinstance(group_info, NotYet) else 0
        self._acquaint(pending.stream.peer, pending.name)
        group_info = self._registry.look_up(WorkerAddress.from_name(pending.name))
        if isinstance(group_info, NotYet):
            return group_info
        return group_info.info or NotYet(f"`{pending.name}` is launching")

    def _retry_pending(self) -> None:
        waiting, self._pending = self._pending, []
        for pending in waiting:
            self._try_pending(pending)

    def _forget(self, stream: PeerStream, request: m.Forget) -> None:
        self._debugging.forget(stream, request.serial)
        self._stores.forget(stream, request.serial)
        self._pending = [
            lookup for lookup in self._pending if (lookup.stream, lookup.serial) != (stream, request.serial)
        ]

    def _acquaint(self, first: str, second: str) -> None:
        for name, partner in ((first, second), (second, first)):
            peer = self._peers.get(name)
            if peer is not None:
                peer.acquaintances.add(partner)

    # Cancelled calls

    def _cancel(self, stream: PeerStream, cancelled: m.Cancel) -> None:
        for name, calls in cancelled.calls.items():
            self._send(name, m.Cancelled(calls))

    def _dismiss(self, stream: PeerStream, dismissed: m.Dismiss) -> None:
        for name, incarnation in dismissed.workers.items():
            peer = self._peers.get(name)
            if peer is not None and peer.hello.incarnation == incarnation:
                self._control.send(peer.stream, m.Cancelled(None))

    # Deaths

    def _lost(self, lost: _Lost) -> None:
        self._pending = [lookup for lookup in self._pending if lookup.stream.peer != lost.peer]
        peer = self._peers.pop(lost.peer, None)
        self._watch.left(lost.peer)
        self._debugging.lost(lost.peer)
        if peer is None:
            return
        address = WorkerAddress.from_name(lost.peer)
        if not address.ranks:
            return
        if not self._registry.died(address, peer.hello.incarnation, self._clock(), node=peer.hello.node):
            return
        for group in self._ownership.gone(lost.peer):
            self._end_group(group)
        self._find_cause(peer, lost.reason)

    def _find_cause(self, peer: Peer, reason: str) -> None:
        hello = peer.hello
        if reason.startswith(NO_ANSWER):
            self._conclude(peer, reason, vanished=True)
            return
        if peer.exit_reason is not None:
            self._conclude(peer, peer.exit_reason)
            return
        self._deaths[peer.name] = _Death(peer, self._clock() + _POSTMORTEM_SECONDS)
        if hello.info.place == self._info.place:
            # Its connection may end before its parent has collected how it ended.
            self._look_at_end(self._deaths[peer.name], last=not self._ends.is_watched(peer.name))
            return
        neighbour = next((other for other in self._peers.values() if other.hello.info.place == hello.info.place), None)
        if neighbour is not None:
            self._control.send(neighbour.stream, m.PostmortemQuestion(peer.name, hello))

    def _take_postmortem(self, stream: PeerStream, report: m.Postmortem) -> None:
        death = self._deaths.pop(report.name, None)
        if death is not None:
            self._conclude(death.peer, report.cause)

    def _look_at_end(self, death: _Death, *, last: bool) -> None:
        """Conclude a death of this machine once the kernel reports how it ended; `last` waits no longer."""
        name = death.peer.name
        end = self._ends.end(name)
        if end is not None or last:
            self._deaths.pop(name, None)
            self._conclude(death.peer, postmortem.describe_end(death.peer.hello.log), end=end)

    def _conclude(
        self, peer: Peer, cause: str | None, *, vanished: bool = False, end: ProcessEnd | None = None
    ) -> None:
        self._ends.drop(peer.name)
        if end is not None:
            cause = f"{end.words}; {cause}" if cause else end.words
        self._registry.died(WorkerAddress.from_name(peer.name), peer.hello.incarnation, self._clock(), cause=cause)
        self._announce_death(peer, cause, vanished=vanished, end=end)
        # Pending lookups of it now fail.
        self._retry_pending()

    def _announce_death(
        self, peer: Peer, cause: str | None, *, vanished: bool = False, end: ProcessEnd | None = None
    ) -> None:
        hello = peer.hello
        died = m.Died(peer.name, hello.incarnation, hello.info.incarnation, hello.node, cause, vanished, end)
        for name in sorted({*peer.acquaintances, m.DRIVER}):
            self._send(name, died)

    # Waits

    def _tick(self) -> None:
        now = self._clock()
        for name, death in list(self._deaths.items()):
            if death.peer.hello.info.place == self._info.place:
                self._look_at_end(death, last=now >= death.until)
            elif now >= death.until:
                del self._deaths[name]
                self._conclude(death.peer, None)
        self._watch.unknown = frozenset(lookup.name for lookup in self._pending if self._is_unknown(lookup))
        for deadlock in self._watch.tick(now, self._ask, self._dead):
            if self._refuse_unknown(deadlock):
                continue
            _log.warning("deadlock among %s: %s", ", ".join(deadlock.members), deadlock.picture)
            for name in deadlock.members:
                serials = tuple(serial for owner, serial in deadlock.operations if owner == name)
                self._send(name, m.Stuck(serials, deadlock.members, deadlock.picture))

    def _is_unknown(self, pending: _Pending) -> bool:
        """Return whether a lookup waits for a name that no group or channel has."""
        name = pending.name if pending.sizes_only else pending.name.rpartition(":")[0]
        return self._registry.incarnation(name) is None

    def _refuse_unknown(self, deadlock: Deadlock) -> bool:
        """Reject names that can no longer be launched, since every process waits; return False if there are none."""
        hopeless = [
            lookup for lookup in self._pending if lookup.stream.peer in deadlock.members and self._is_unknown(lookup)
        ]
        self._pending = [lookup for lookup in self._pending if lookup not in hopeless]
        for pending in hopeless:
            name = pending.name if pending.sizes_only else pending.name.rpartition(":")[0]
            error = UnknownGroupError(name, tuple(self._registry.groups()), where=pending.stream.peer)
            self._refuse(pending.stream, pending.serial, error)
        return bool(hopeless)

    def _report(self, stream: PeerStream, report: m.WaitReport) -> None:
        self._watch.alarm()

    def _answer(self, stream: PeerStream, answer: m.ProcessAnswer) -> None:
        if answer.recipients:
            names = {peer.hello.info.incarnation: name for name, peer in self._peers.items()}
            recipients = tuple(names[incarnation] for incarnation in answer.recipients if incarnation in names)
            answer = replace(answer, recipients=recipients)
        self._watch.answered(stream.peer, answer)

    def _ask(self, round_: Round) -> Iterable[str]:
        names = [name for name in self._peers if not _only_looks(name)]
        for name in names:
            self._send(name, m.Question(round_.serial, round_.stacks))
        return names

    def _dead(self) -> dict[str, float]:
        now = self._clock()
        return {
            name: now - (worker.died_at or now) for name, worker in self._workers().items() if worker.life is Life.DEAD
        }

    def _explain(self, stream: PeerStream, serial: int, body: m.Explain) -> None:
        def answer(round_: Round) -> None:
            round_.answers[stream.peer] = m.ProcessAnswer(round_.serial, body.publication)
            self._reply(stream, serial, round_.graph(self._dead()).explain(stream.peer, body.serial))

        self._watch.begin(self._clock(), self._ask, answer)

    def _inspect(self, stream: PeerStream, serial: int, body: m.Inspect) -> None:
        def answer(round_: Round) -> None:
            snapshot = m.JobSnapshot(self._job, self._hellos(), self._workers(), self._dead(), round_.answers)
            self._reply(stream, serial, snapshot)

        self._watch.begin(self._clock(), self._ask, answer, stacks=body.stacks)

    def _hellos(self) -> dict[str, m.Hello]:
        return {name: peer.hello for name, peer in self._peers.items() if not _only_looks(name)}

    def _workers(self) -> dict[str, WorkerRecord[EndpointInfo]]:
        return {
            str(worker.address): worker for group in self._registry.groups() for worker in self._registry.workers(group)
        }


@dataclass(frozen=True, slots=True)
class _Lost:
    peer: str
    reason: str


def _only_looks(name: str) -> bool:
    """Return whether this is an inspector from outside of the job."""
    return name.startswith(m.INSPECTOR)
