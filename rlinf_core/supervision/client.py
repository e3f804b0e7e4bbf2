"""The connection of a process to the manager of its job."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.connection import NO_ANSWER
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import EndpointInfo, Resolver, Settings, StaticResolver, own_place
from rlinf_core.collective.handshake import ClusterSecret
from rlinf_core.collective.message import FallbackDumps
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
from rlinf_core.failures import PackedError
from rlinf_core.node.process_life import EndWatch, UnprovenProcessError, own_identity
from rlinf_core.node.stacks import SECONDS, ProcessStacks, StackRequest, describe_stacks, read_stacks
from rlinf_core.process.activity import InflightOps, holdings
from rlinf_core.supervision.deaths import CAUSE_SECONDS, DeathNews, Died, exit_reason, own_log
from rlinf_core.supervision.job_view import JobSnapshot
from rlinf_core.supervision.lives import MANAGER, GroupLife, Hello, NotYet
from rlinf_core.supervision.rpc import LATER, Caller, Reply, Rpc
from rlinf_core.supervision.waits import ChannelView, ProcessAnswer, WaitReports
from rlinf_core.waiting import FIRST_WORD_AFTER, OperationKind

_log = logging.getLogger("rlinf.job")
# The time limit for a reply of the manager, which asks all processes for at most 0.7 s.
_SNAPSHOT_SECONDS = 3.0
# Seconds within which the parent of an ended process reaps it, and between two checks of that.
_END_SECONDS, _END_PAUSE = 0.5, 0.02


class ManagerClient(Resolver):
    """The connection of a process to its manager: lookups of peers, news of deaths, and reports of waits.

    Attributes:
        me: the address of this process: of its worker, or a name without ranks, such as `driver`.
        in_flight: returns the workers with unanswered calls of this process.
        channels: returns the channels hosted by this process.
        deaths: the deaths reported to this process.
        wait_reports: describes the waits of this process, and reports long ones.
        on_cancel: called with the calls cancelled by their callers, or None for all calls.
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
            ip: the address at which other nodes reach this process.
            has_main: whether this process runs code outside of methods, as a driver does.
            fallback: pickles objects that plain pickle cannot.
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
        # By serial: the requests without a reply, and the manager's notices about those that wait for a peer.
        self._requests: dict[int, Work[Any]] = {}
        self._notices: dict[int, NotYet] = {}
        self._warned: set[int] = set()
        self._failures: dict[int, Exception] = {}
        self.deaths = DeathNews()
        self.wait_reports = WaitReports(me, self.operations, self._call, self._tell)
        self._closed = False
        # The reason why the connection to the manager ended.
        self._manager_lost: str | None = None
        self._ends = EndWatch()
        if has_main and info.place == own_place():
            self._ends.watch(MANAGER, info.pid)
        self.endpoint = Endpoint(
            ClusterSecret(session.secret),
            ip=ip,
            settings=settings,
            directory=_own(session.folder),
            operations=self.operations,
            fallback=fallback,
            explain=self._explain,
        )
        self.endpoint.waits.picture = self.wait_reports.picture_of_expired
        self.endpoint.waits.paused = self.wait_reports.paused
        manager = WorkerAddress(MANAGER)
        self._stream = self.endpoint.stream(me, manager, StaticResolver({manager: info}))
        self.endpoint.on_peer_lost(self._peer_lost)
        methods: tuple[Callable[..., object], ...] = (
            self.observe,
            self.died,
            self.stuck,
            self.cancelled,
            self.not_yet,
            self.exit_reason,
            self.answer_stacks,
            self.at_breakpoint,
        )
        named = {method.__name__: method for method in methods}
        self._rpc = Rpc(self.endpoint, named, self._tick, lambda: self.wait_reports.due_in, {"died": self.deaths.add})

    # Calls of the manager

    def announce(self, incarnation: int, node: str, node_rank: int | None, device: str = "", host: str = "") -> None:
        """Register this process, see `Hello`."""
        info = self.endpoint.info
        self._tell("hello", Hello(incarnation, info, node, node_rank, device, own_log(), host, own_identity()))

    def tell_exit_reason(self, cause: str) -> None:
        """Report why this process is about to end deliberately."""
        with suppress(RuntimeFailure):
            self._call("exit_reason", cause, seconds=CAUSE_SECONDS)

    def will_end(self, name: str, incarnation: int, cause: str) -> None:
        """Report why this process is about to end a worker; it may learn of the end before the manager does."""
        self.deaths.end_here(name, incarnation, cause)
        with suppress(RuntimeFailure):
            self._call("exit_reason", cause, name, seconds=CAUSE_SECONDS)

    def lookup(self, address: WorkerAddress, timeout: float, *, channel: bool = False) -> EndpointInfo:
        """Return the endpoint of a worker, or of a channel's process, see `Resolver.lookup`."""
        name = address.get_name()
        info: EndpointInfo = self._call("lookup", name, channel, seconds=max(0.0, timeout), target=name)
        # Drop the news about its predecessor, if any.
        self.deaths.forget(name)
        return info

    def group_size(self, name: str, timeout: float) -> int:
        """Return the number of workers of a group, once its launch has begun."""
        return self._call("group_size", name, seconds=timeout, target=name)

    def group_life(self, name: str, timeout: float) -> GroupLife:
        """Return the current incarnation of a group, and the nodes of its workers.

        Raises:
            UnknownGroupError: there is no such group.
        """
        return self._call("group_life", name, seconds=timeout, target=name)

    def open_group(self, name: str, size: int, timeout: float, *, channel: bool = False) -> int:
        """Register a group, or a channel, that is about to be launched; return its incarnation."""
        return self._call("open_group", name, size, channel, seconds=timeout, kind=OperationKind.LAUNCH, target=name)

    def reopen_worker(self, address: str, timeout: float) -> int:
        """Register that a worker is about to be launched in place of one that has died; return its incarnation."""
        # Without `target`: waits for that worker fail with the news of its death.
        return self._call("reopen", address, seconds=timeout, kind=OperationKind.LAUNCH)

    def declare(self, groups: Iterable[str]) -> None:
        """Declare groups that the job will have, so that other names fail at once; declaring again adds names."""
        self._tell("declare", tuple(groups))

    def close_group(self, name: str, incarnation: int | None = None) -> None:
        """Announce a group's shutdown, that of one incarnation if given: later exits of its workers are expected."""
        self._tell("close_group", name, incarnation)

    def cancel(self, calls: Mapping[str, tuple[str, ...]]) -> None:
        """Cancel calls on workers, by Ray's ids, and wake the workers that wait in them."""
        self._tell("cancel", calls)

    def dismiss(self, workers: Mapping[str, int]) -> None:
        """Interrupt the waits of workers, given with their incarnations, for the shutdown of their group."""
        self._tell("dismiss", workers)

    def snapshot(self, *, stacks: bool = False, seconds: float = _SNAPSHOT_SECONDS) -> JobSnapshot:
        """Return the current operations of the job's processes, with the stacks of their threads if wanted."""
        return self._call("snapshot", stacks, seconds=seconds)

    def read_stacks(self, helper: str, request: StackRequest) -> list[ProcessStacks]:
        """Return the stacks of a process of the job, read by the process `helper` on the same machine."""
        return self._call("read_stacks", helper, request, seconds=SECONDS + _SNAPSHOT_SECONDS)

    def read_store(self, keys: Sequence[str], seconds: float, *, wait: bool) -> tuple[bytes | None, ...]:
        """Return the value of each key in the store of this worker's group, or None for a missing key.

        `wait`: whether to wait until all keys have values.
        """
        return self._call("read_store", tuple(keys), wait, seconds=seconds)

    def write_store(self, key: str, value: bytes | int | None, seconds: float) -> bytes | None:
        """Store bytes in the store of this worker's group, add an int to the key's number, or remove the key (None).

        Returns: the new value, or the removed one.
        """
        return self._call("write_store", key, value, seconds=seconds)

    def stops_at(self, place: str | None, *, attached: bool = False) -> None:
        """Report that this process waits at a breakpoint, or with None that it continues.

        `attached`: whether a debugger is attached already.
        """
        self._tell("stops_at", place, attached)

    def _tell(self, name: str, *args: object) -> None:
        self._rpc.tell(self._stream, name, *args)

    def _call(
        self,
        name: str,
        *args: object,
        seconds: float,
        kind: OperationKind = OperationKind.CONNECT,
        target: str = MANAGER,
    ) -> Any:
        """Call a method of the manager; return its result.

        Raises:
            CommunicationTimeoutError: there is no reply within `seconds`.
            RuntimeFailure: the manager is gone.
            Exception: the error in the reply.
        """
        work: Work[Any] = Work(kind, target, seconds, self.endpoint.waits)
        call = self._rpc.call(name, *args)
        self._requests[call.serial] = work
        if self._manager_lost is not None:
            work.fail(self._job_ended(self._manager_lost))

        def take(reply: Reply) -> None:
            if reply.error is not None:
                work.fail(reply.error.unpack())
            else:
                work.finish(reply.value)

        try:
            self._rpc.ask(self._stream, call, take)
            return work.wait()
        except CommunicationTimeoutError:
            self._tell("forget", call.serial)
            notice = self._notices.get(call.serial)
            if notice is not None:
                raise PeerNotFoundError(
                    target, f"`{target}` did not appear within {seconds:.3g} s", why=notice.message, help=notice.help
                ) from None
            raise
        finally:
            self._rpc.forget(call.serial)
            self._requests.pop(call.serial, None)
            self._notices.pop(call.serial, None)
            self._warned.discard(call.serial)

    # Calls by the manager

    def observe(self, caller: Caller, stacks: bool) -> ProcessAnswer:
        """Return the current operations of this process."""
        return ProcessAnswer(
            self.operations.publication(),
            tuple(self.in_flight()),
            self.channels(),
            describe_stacks() if stacks else "",
            self.operations.recent() if stacks else "",
            self.endpoint.recipients_in_transit(),
            holdings(),
        )

    def died(self, caller: Caller, died: Died) -> None:
        """Fail the operations with a worker that has died, unless its successor is connected already."""
        connected = {stream.incarnation for stream in self.endpoint.streams() if stream.peer == died.address}
        if connected <= {None, died.endpoint}:
            self.endpoint.fail(died.error(self._name), WorkerAddress.from_name(died.address))

    def stuck(self, caller: Caller, serials: Sequence[int], members: tuple[str, ...], picture: str) -> None:
        """Fail operations of this process that are part of a deadlock."""
        current = {operation.serial for operation in self.operations.publication().operations}
        for serial in serials:
            error = DeadlockError(members, picture, where=self._name)
            if not self.endpoint.waits.fail(serial, error) and serial in current:
                self._failures[serial] = error

    def cancelled(self, caller: Caller, calls: tuple[str, ...] | None) -> None:
        """Cancel calls that their caller has cancelled; None, at the group's shutdown, means all calls."""
        self.on_cancel(calls)

    def not_yet(self, caller: Caller, serial: int, message: str, help: str | None) -> None:
        """Record why a lookup of this process still waits."""
        if serial in self._requests:
            self._notices[serial] = NotYet(message, help)

    def exit_reason(self, caller: Caller, log: str | None) -> str | None:
        """Return the cause of death of a process of this node, as found in its log."""
        return exit_reason(log)

    def answer_stacks(self, caller: Caller, request: StackRequest) -> object:
        """Answer with the stacks of a process of this node and of those that it started; takes up to 2 s."""

        def answer() -> None:
            try:
                self._rpc.answer(caller, read_stacks(request))
                return
            except UnprovenProcessError as error:
                failure = RuntimeFailure(str(error))
            except OSError as error:
                failure = RuntimeFailure("the process has ended", why=error.strerror)
            self._rpc.answer(caller, error=PackedError.of(failure))

        threading.Thread(target=answer, name="rlinf-stacks", daemon=True).start()
        return LATER

    def at_breakpoint(self, caller: Caller, name: str, place: str) -> None:
        """Log which process waits at which breakpoint, and the command that attaches to it."""
        session = current_session() or self._session
        folder = os.path.dirname(session.log_folder) if session.log_folder is not None else None
        run = f"--job {session.job}" if folder is None else min(os.path.relpath(folder), folder, key=len)
        _log.warning("%s waits at a breakpoint, %s; `rlinf ps --attach %s %s` attaches to it", name, place, run, name)

    def _warn_of_names(self) -> None:
        """Log once that a name may be misspelt, after a delay, since groups start in parallel."""
        for serial, notice in list(self._notices.items()):
            work = self._requests.get(serial)
            if work is None or serial in self._warned or time.monotonic() - work.since < FIRST_WORD_AFTER:
                continue
            self._warned.add(serial)
            if notice.help:
                _log.warning("%s: %s; waiting up to %.3g s", notice.message, notice.help, work.seconds)

    def lost_manager(self) -> WorkerDiedError | None:
        """Return the death of the job's manager; None while it lives, and in processes other than its driver."""
        if self._manager_lost is None or self._closed or not self._ends.is_watched(MANAGER):
            return None
        deadline = time.monotonic() + _END_SECONDS
        while (end := self._ends.end(MANAGER)) is None and time.monotonic() < deadline:
            time.sleep(_END_PAUSE)
        cause = self._manager_lost if end is None else end.words
        return WorkerDiedError(MANAGER, node="this machine", cause=f"{cause}; it knows the job's workers", end=end)

    # Waiting

    def failure(self, serial: int) -> Exception | None:
        """Return the error of an operation that is not a `Work`, once it has failed; returned only once."""
        return self._failures.pop(serial, None)

    def _tick(self) -> None:
        if not self.wait_reports.due_in and not self._closed:
            self._warn_of_names()
            self.wait_reports.report()

    # Deaths of peers

    def _explain(self, peer: str, reason: str) -> Exception:
        """Return the error for a lost peer; waits briefly for the manager to report its death."""
        if peer == MANAGER or self._closed:
            return RuntimeFailure("the job has ended", why=f"its manager is gone: {reason}")
        if reason.startswith(NO_ANSWER):
            # The manager has another connection to that host, and may notice the loss later.
            return WorkerDiedError(peer, node=self._node_of(peer), cause=reason, where=self._name)
        # Only news of these incarnations counts: there may be news of an earlier one.
        endpoints = {stream.incarnation for stream in self.endpoint.streams() if stream.peer == peer}
        died = self.deaths.wait(peer, endpoints=endpoints - {None})
        if died is not None:
            return died.error(self._name)
        return WorkerDiedError(peer, node=self._node_of(peer), where=self._name)

    def _node_of(self, peer: str) -> str | None:
        """Return a description of the node of a worker, or None if the manager does not know it."""
        address = WorkerAddress.from_name(peer)
        try:
            life = self.group_life(str(address.get_parent_address()), CAUSE_SECONDS)
            return life.nodes[address.rank] or None
        except (RLinfError, IndexError):
            return None

    def _peer_lost(self, peer: str, reason: str) -> None:
        if peer != MANAGER or self._closed:
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
        self.wait_reports.close()
        self._rpc.stop()
        self.endpoint.close(linger=linger)
        self._ends.drop(MANAGER)


def _own(folder: str | None) -> str | None:
    """Return the folder if this process can write in it, else None."""
    return folder if folder is not None and os.access(folder, os.W_OK) else None


_client: ManagerClient | None = None


def current_client() -> ManagerClient | None:
    """Return this process's connection to its job's manager, or None before it has one."""
    return _client


def enter_job(client: ManagerClient | None) -> None:
    """Make `client` this process's connection to its job."""
    global _client
    _client = client
