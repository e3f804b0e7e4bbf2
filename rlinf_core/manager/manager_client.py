"""A process's connection to the manager of its job."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.connections.connection import NO_ANSWER
from rlinf_core.collective.connections.handshake import ClusterSecret
from rlinf_core.collective.connections.settings import Settings
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import (
    EndpointInfo,
    Resolver,
    StaticResolver,
    own_place,
)
from rlinf_core.collective.messages.codec import FallbackDumps
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.work import Work
from rlinf_core.context import Session, current_session
from rlinf_core.errors import (
    CancelledOperationError,
    CommunicationTimeoutError,
    DeadlockError,
    PeerNotFoundError,
    RLinfError,
    RuntimeFailure,
    WorkerDiedError,
)
from rlinf_core.manager import manager_messages as m
from rlinf_core.manager import postmortem
from rlinf_core.manager.control_rpc import ControlRpc, expect
from rlinf_core.manager.death_news import CAUSE_SECONDS, DeathNews
from rlinf_core.manager.debugging import answer_stacks, at_breakpoint
from rlinf_core.manager.wait_edges import ChannelView
from rlinf_core.manager.watch import LongWaits, is_long_wait
from rlinf_core.node.process_end import EndWatch
from rlinf_core.node.process_identity import own_identity
from rlinf_core.node.stacks.process_stacks import SECONDS, ProcessStacks
from rlinf_core.node.stacks.stack_text import describe_stacks
from rlinf_core.process.inflight_ops import InflightOps
from rlinf_core.waiting import FIRST_WORD_AFTER, Operation, OperationKind, Publication, PublishedOperation

_log = logging.getLogger("rlinf.job")
_REPORT_EVERY = 1.0
_PICTURE_SECONDS = 1.5
# For an answer of the manager, which asks all processes for at most 0.7 s.
_SNAPSHOT_SECONDS = 3.0
_SHORTEST_EXTENDED = 1.0
# Seconds until the parent of an ended process has collected how it ended, and between looks.
_END_SECONDS, _END_PAUSE = 0.5, 0.02
# The serial of an operation that has already ended; no operation has it.
_EXPIRED = -2


class ManagerClient(Resolver):
    """The connection of a process to its manager: lookups of peers, news of deaths, and reports of waits.

    Attributes:
        me: the address of this process: of its worker, or a name without ranks, as `driver`.
        endpoint: the endpoint in use.
        in_flight: returns the workers with unanswered calls of this process.
        channels: returns the channels hosted by this process.
        deaths: the deaths that it has heard of.
        on_cancel: called with the calls cancelled by their callers, or None for all.
    """

    def __init__(
        self,
        session: Session,
        info: EndpointInfo,
        me: WorkerAddress,
        *,
        ip: str | None = None,
        has_main: bool = False,
        fallback: FallbackDumps | None = None,
        settings: Settings | None = None,
    ) -> None:
        """
        Args:
            info: the endpoint of the job's manager.
            me: the address of this process.
            ip: the address at which other nodes reach it.
            has_main: whether it runs code outside of methods, as a driver does.
            fallback: pickles what plain pickle cannot.
            settings: the settings of its endpoint; by default from the environment.
        """
        self.me = me
        self._session = session
        self.info = info
        self.operations = InflightOps(has_main=has_main)
        self.in_flight: Callable[[], Sequence[str]] = tuple
        self.channels: Callable[[], Mapping[str, ChannelView]] = dict
        self.on_cancel: Callable[[tuple[str, ...] | None], object] = self._cancel_all
        self._name = me.get_name()
        self._serials = itertools.count(1)
        self._requests: dict[int, Work[object]] = {}
        self._notices: dict[int, m.NotYetNotice] = {}
        self._warned: set[int] = set()
        self._failures: dict[int, Exception] = {}
        self.deaths = DeathNews()
        self._next_report = 0.0
        self._long_waits = LongWaits()
        self._closed = False
        # Why the connection to the manager ended.
        self._manager_lost: str | None = None
        self._ends = EndWatch()
        if has_main and info.place == own_place():
            self._ends.watch(m.MANAGER, info.pid)
        self.endpoint = Endpoint(
            ClusterSecret(session.secret),
            ip=ip,
            settings=settings,
            directory=_own(session.folder),
            operations=self.operations,
            fallback=fallback,
            explain=self._explain,
        )
        self.endpoint.waits.picture = self._picture
        self.endpoint.waits.paused = self.paused
        manager = WorkerAddress(m.MANAGER)
        self._stream = self.endpoint.stream(me, manager, StaticResolver({manager: info}))
        self.endpoint.on_peer_lost(self._peer_lost)
        self._control = ControlRpc(self.endpoint, self._handle, self._report_long_waits, self._free_for, self._at_once)

    # Outgoing

    def announce(self, incarnation: int, node: str, node_rank: int | None, device: str = "", host: str = "") -> None:
        log = postmortem.own_log()
        hello = m.Hello(incarnation, self.endpoint.info, node, node_rank, device, log, host, own_identity())
        self._control.send(self._stream, hello)

    def tell(self, message: m.ToManager) -> None:
        self._control.send(self._stream, message)

    def tell_exit_reason(self, cause: str) -> None:
        """Report why this process is about to end deliberately."""
        with suppress(RuntimeFailure):
            self.request(m.ExitReason(cause), CAUSE_SECONDS)

    def will_end(self, name: str, incarnation: int, cause: str) -> None:
        """Report why a worker is about to be ended by this process, which hears of its end before the manager may."""
        self.deaths.end_here(name, incarnation, cause)
        with suppress(RuntimeFailure):
            self.request(m.ExitReason(cause, name), CAUSE_SECONDS)

    def request(
        self,
        body: object,
        timeout: float,
        kind: OperationKind = OperationKind.CONNECT,
        target: str = m.MANAGER,
    ) -> object:
        """Send a request and return the manager's reply.

        Raises:
            CommunicationTimeoutError: there is no reply within `timeout` seconds.
            RuntimeFailure: the manager is gone.
            Exception: the error in the reply.
        """
        serial = next(self._serials)
        work: Work[object] = Work(kind, target, timeout, self.endpoint.waits)
        self._requests[serial] = work
        if self._manager_lost is not None:
            work.fail(self._job_ended(self._manager_lost))
        try:
            self._control.send(self._stream, m.ManagerRequest(serial, body))
            return work.wait()
        except CommunicationTimeoutError:
            self.tell(m.Forget(serial))
            notice = self._notices.get(serial)
            if notice is not None:
                raise PeerNotFoundError(
                    target, f"`{target}` did not appear within {timeout:.3g} s", why=notice.message, help=notice.help
                ) from None
            raise
        finally:
            self._requests.pop(serial, None)
            self._notices.pop(serial, None)
            self._warned.discard(serial)

    def lookup(self, address: WorkerAddress, timeout: float) -> EndpointInfo:
        name = address.get_name()
        info = expect(self.request(m.Lookup(name), timeout, OperationKind.CONNECT, name), EndpointInfo)
        # Of its predecessor, if any.
        self.deaths.forget(name)
        return info

    def group_size(self, name: str, timeout: float) -> int:
        """Return the number of workers of a group, once its launch has begun."""
        return expect(self.request(m.GroupSize(name), timeout, OperationKind.CONNECT, name), int)

    def group_life(self, name: str, timeout: float) -> m.GroupLife:
        """Return the current incarnation of a group, and the nodes of its workers.

        Raises:
            UnknownGroupError: there is no such group.
        """
        return expect(self.request(m.GroupMembers(name), timeout, OperationKind.CONNECT, name), m.GroupLife)

    def open_group(self, name: str, size: int, timeout: float, *, channel: bool = False) -> int:
        """Register a group, or a channel, that is about to be launched; return its incarnation."""
        return expect(self.request(m.OpenGroup(name, size, channel), timeout, OperationKind.LAUNCH, name), int)

    def reopen_worker(self, address: str, timeout: float) -> int:
        """Register that a worker is about to be launched in place of one that has died; return its incarnation."""
        # Not named as a wait for that worker: those end with the news of its death.
        return expect(self.request(m.ReopenWorker(address), timeout, OperationKind.LAUNCH), int)

    def declare(self, groups: Iterable[str]) -> None:
        """Declare groups that the job will have, so that other names fail at once; declaring again adds names."""
        self.tell(m.Declare(tuple(groups)))

    def close_group(self, name: str, incarnation: int | None = None) -> None:
        """Announce a group's shutdown, that of one incarnation if given: later exits of its workers are expected."""
        self.tell(m.CloseGroup(name, incarnation))

    def cancel(self, calls: Mapping[str, tuple[str, ...]]) -> None:
        """Cancel calls on workers, by Ray's ids: workers in such a call are woken."""
        self.tell(m.Cancel(calls))

    def dismiss(self, workers: Mapping[str, int]) -> None:
        """Interrupt the waits of workers, by their incarnations, for the shutdown of their group."""
        self.tell(m.Dismiss(workers))

    def snapshot(self, *, stacks: bool = False, seconds: float = _SNAPSHOT_SECONDS) -> m.JobSnapshot:
        """Return what the processes of the job do, with the stacks of their threads if wanted."""
        return expect(self.request(m.Inspect(stacks), seconds), m.JobSnapshot)

    def read_stacks(self, question: m.ReadStacks, seconds: float = SECONDS + _SNAPSHOT_SECONDS) -> list[ProcessStacks]:
        """Return the stacks of a process of the job, which another one of its machine reads."""
        return cast("list[ProcessStacks]", expect(self.request(question, seconds), list))

    def stops_at(self, place: str | None, *, attached: bool = False) -> None:
        """Report that this process waits at a breakpoint; at None that it continues.

        `attached`: whether somebody steps through it already.
        """
        self.tell(m.BreakpointWait(place, attached))

    # Incoming

    def _at_once(self, message: object) -> bool:
        """Handle urgent messages in the reading thread."""
        if isinstance(message, m.Reply):
            work = self._requests.get(message.serial)
            if work is not None:
                if message.error is not None:
                    work.fail(message.error.unpack())
                else:
                    work.finish(message.value)
            return True
        if isinstance(message, m.Died):
            self.deaths.add(message)
        return False

    def _handle(self, stream: PeerStream | None, message: object) -> None:
        if isinstance(message, m.Question):
            stacks, recent = (describe_stacks(), self.operations.recent()) if message.stacks else ("", "")
            publication, in_flight = self.operations.publication(), tuple(self.in_flight())
            recipients = self.endpoint.recipients_in_transit()
            answer = m.ProcessAnswer(message.round, publication, in_flight, self.channels(), stacks, recent, recipients)
            self.tell(answer)
        elif isinstance(message, m.Died):
            if not self._succeeded(message):
                self.endpoint.fail(self._death(message), WorkerAddress.from_name(message.address))
        elif isinstance(message, m.Stuck):
            self._fail_stuck(message)
        elif isinstance(message, m.Cancelled):
            self.on_cancel(message.calls)
        elif isinstance(message, m.NotYetNotice):
            if message.serial in self._requests:
                self._notices[message.serial] = message
        elif isinstance(message, m.PostmortemQuestion):
            cause = postmortem.describe_end(message.hello.log)
            self.tell(m.Postmortem(message.name, cause))
        elif isinstance(message, m.StackQuestion):
            # In a separate thread: it takes seconds.
            threading.Thread(target=lambda: self.tell(answer_stacks(message)), name="rlinf-stacks", daemon=True).start()
        elif isinstance(message, m.AtBreakpoint):
            session = current_session() or self._session
            _log.warning("%s", at_breakpoint(message, session.job, session.log_folder))

    def _succeeded(self, died: m.Died) -> bool:
        """Return whether a successor of a dead worker is connected already."""
        bound = {stream.incarnation for stream in self.endpoint.streams() if stream.peer == died.address}
        return bool(bound - {None, died.endpoint})

    def _warn_of_names(self) -> None:
        """Log once that a name may be misspelt: not at once, since groups start in parallel."""
        for serial, notice in list(self._notices.items()):
            work = self._requests.get(serial)
            if work is None or serial in self._warned or time.monotonic() - work.since < FIRST_WORD_AFTER:
                continue
            self._warned.add(serial)
            if notice.help:
                _log.warning("%s: %s; waiting up to %.3g s", notice.message, notice.help, work.seconds)

    def lost_manager(self) -> WorkerDiedError | None:
        """Return the death of the job's manager, as its driver sees it; None while it lives, and in other processes."""
        if self._manager_lost is None or self._closed or not self._ends.is_watched(m.MANAGER):
            return None
        deadline = time.monotonic() + _END_SECONDS
        while (end := self._ends.end(m.MANAGER)) is None and time.monotonic() < deadline:
            time.sleep(_END_PAUSE)
        cause = self._manager_lost if end is None else end.words
        return WorkerDiedError(m.MANAGER, node="this machine", cause=f"{cause}; it knows the job's workers", end=end)

    # Waiting

    def failure(self, serial: int) -> Exception | None:
        """Return the error of an operation that is not a `Work`, once it has failed; returned only once."""
        return self._failures.pop(serial, None)

    def _fail_stuck(self, stuck: m.Stuck) -> None:
        current = {operation.operation.serial for operation in self.operations.publication().operations}
        for serial in stuck.serials:
            error = DeadlockError(stuck.members, stuck.picture, where=self._name)
            if not self.endpoint.waits.fail(serial, error) and serial in current:
                self._failures[serial] = error

    def _free_for(self) -> float:
        return max(0.0, self._next_report - time.monotonic())

    def _report_long_waits(self) -> None:
        now = time.monotonic()
        if now < self._next_report or self._closed:
            return
        self._next_report = now + _REPORT_EVERY
        self._warn_of_names()
        publication = self.operations.publication()
        if any(is_long_wait(operation, is_worker=bool(self.me.ranks)) for operation in publication.operations):
            self.tell(m.WaitReport(publication))
        for operation in self._long_waits.due(publication):
            # In a separate thread: explaining a wait needs answers of other processes, and of this one.
            word = threading.Thread(
                target=self._say_word, args=(operation, publication), name="rlinf-first-word", daemon=True
            )
            word.start()

    def _say_word(self, operation: Operation, publication: Publication) -> None:
        picture = self._ask_for_picture(operation.serial, publication)
        if picture is None:
            picture = f"{self._name} {operation.waits(time.monotonic() - operation.since)}"
        if not self._closed:
            _log.warning("%s", picture)

    def paused(self, target: str, seconds: float) -> float:
        """Return the number of the last `seconds` in which a process of the job waited at a breakpoint.

        A shorter time limit than a second is not extended: its caller continues after it by design.
        """
        if target == m.MANAGER or seconds < _SHORTEST_EXTENDED or self._closed:
            return 0.0
        try:
            return cast("float", self.request(m.PausedSeconds(seconds), _PICTURE_SECONDS))
        except RuntimeFailure:
            return 0.0

    def picture_of(self, serial: int) -> str | None:
        """Return a description of the peers that an operation of this process waits for, if available quickly."""
        return self._ask_for_picture(serial, self.operations.publication())

    def _picture(self, work: Work[object]) -> str | None:
        """Return a description of the peers that an expired operation waits for; blocks briefly."""
        if work.target == m.MANAGER:
            return None
        # It may have ended already, and is described as it was.
        operation = Operation(work.kind, work.target, work.key, work.since, _EXPIRED)
        shown = PublishedOperation(operation, time.monotonic() - work.since)
        now = self.operations.publication()
        return self._ask_for_picture(_EXPIRED, replace(now, operations=(*now.operations, shown), running=False))

    def _ask_for_picture(self, serial: int, publication: Publication) -> str | None:
        if self._closed:
            return None
        try:
            return cast("str", self.request(m.Explain(serial, publication), _PICTURE_SECONDS)) or None
        except RuntimeFailure:
            return None

    # Deaths of peers

    def _explain(self, peer: str, reason: str) -> Exception:
        """Return the error for a lost peer; waits for the manager's findings."""
        if peer == m.MANAGER or self._closed:
            return RuntimeFailure("the job has ended", why=f"its manager is gone: {reason}")
        if reason.startswith(NO_ANSWER):
            # The manager has its own connection to that host, and may notice later.
            return WorkerDiedError(peer, node=self._node_of(peer), cause=reason, where=self._name)
        # Its incarnation: there may be news of an earlier one.
        endpoints = {stream.incarnation for stream in self.endpoint.streams() if stream.peer == peer}
        died = self.deaths.wait(peer, endpoints=endpoints - {None})
        if died is not None:
            return self._death(died)
        return WorkerDiedError(peer, node=self._node_of(peer), where=self._name)

    def _node_of(self, peer: str) -> str | None:
        """Return where a worker runs or ran, in words, as far as the manager knows."""
        address = WorkerAddress.from_name(peer)
        try:
            life = self.group_life(str(address.get_parent_address()), CAUSE_SECONDS)
            return life.nodes[address.rank] or None
        except (RLinfError, IndexError):
            return None

    def _death(self, died: m.Died) -> WorkerDiedError:
        return WorkerDiedError(died.address, node=died.node, cause=died.cause, end=died.end, where=self._name)

    def _peer_lost(self, peer: str, reason: str) -> None:
        if peer != m.MANAGER or self._closed:
            return
        if not reason.startswith(NO_ANSWER):
            self._manager_lost = reason
        for work in list(self._requests.values()):
            work.fail(self._job_ended(reason))

    def _job_ended(self, reason: str) -> RuntimeFailure:
        return RuntimeFailure("the job has ended", why=f"its manager is gone: {reason}", where=self._name)

    def _cancel_all(self, calls: tuple[str, ...] | None) -> None:
        self.endpoint.fail(CancelledOperationError("the call was cancelled", where=self._name))

    def close(self, linger: float = 1.0) -> None:
        """Close the connection. Idempotent."""
        if not self.deaths.close():
            return
        self._closed = True
        self._control.stop()
        self.endpoint.close(linger=linger)
        self._ends.drop(m.MANAGER)


def _own(folder: str | None) -> str | None:
    """Return the folder if it belongs to this user on this machine."""
    return folder if folder is not None and os.access(folder, os.W_OK) else None


_client: ManagerClient | None = None


def current_client() -> ManagerClient | None:
    """Return this process's connection to its job's manager, or None before it has one."""
    return _client


def enter_job(client: ManagerClient | None) -> None:
    """Make `client` this process's connection to its job."""
    global _client
    _client = client
