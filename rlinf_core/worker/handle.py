"""The handle of a call on a worker group: waits for its results, alone or together with other calls.

Meanwhile it checks for the death of processes that the workers depend on, and for stopped ones: no other process would
soon report the death of gcs_server, raylet or the manager to the driver.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

from rlinf_core import env_vars
from rlinf_core.address import WorkerAddress
from rlinf_core.cluster import engine
from rlinf_core.cluster.ray_api import gather, no_cluster, ray_api
from rlinf_core.collective.endpoint_info import own_place
from rlinf_core.errors import (
    CancelledOperationError,
    ClusterError,
    CommunicationTimeoutError,
    RLinfError,
    WorkerDiedError,
)
from rlinf_core.failures import WorkerGroupError, followed
from rlinf_core.process.activity import InflightOps, current_task_key
from rlinf_core.process.proc import MARK, processes_of, stat
from rlinf_core.suggest import quoted
from rlinf_core.supervision.client import ManagerClient, current_client
from rlinf_core.supervision.job_view import spell_stopped
from rlinf_core.waiting import Deadline, OperationKind, spell_seconds
from rlinf_core.worker.calls import GroupCall, GroupMember, check_call, unanswered
from rlinf_core.worker.timer import Reduction, reduce_durations

LOGGER = logging.getLogger("rlinf")
_JOB_LOGGER = logging.getLogger("rlinf.job")
# Seconds for which an ending raylet outlives the processes below it, and between two checks of that.
_ENGINE_SECONDS: Final = 0.5
_ENGINE_PAUSE: Final = 0.01
# Seconds between two checks for deaths, and until the first check for stopped processes.
_LOOK_SECONDS: Final = 0.2
_FIRST_LOOK: Final = 2.0


def fallen_watcher() -> WorkerDiedError | None:
    """Return the death of `gcs_server`, `raylet` or `manager`; None while all of them live.

    A raylet that ends, for example because an agent of it died, first ends the manager and the workers. So if the
    manager is gone, wait half a second for the end of the raylet.
    """
    client = current_client()
    lost = client.lost_manager() if client is not None else None
    died, deadline = engine.fallen(), time.monotonic() + _ENGINE_SECONDS
    while lost is not None and died is None and time.monotonic() < deadline:
        time.sleep(_ENGINE_PAUSE)
        died = engine.fallen()
    return died or lost


class WaitWatch:
    """The checks during one wait for workers, by a handle or by a loop that polls calls."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = 0.0
        self._next_stopped = _FIRST_LOOK

    def look(self) -> None:
        """Check for deaths, and warn of stopped processes of the driver's own Ray: after 2 s, then ever more rarely.

        Raises:
            WorkerDiedError: a process that all workers depend on has died; the error names it.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_SECONDS
        died = fallen_watcher()
        if died is not None:
            # Log now: the run reports the error only when all its processes have ended.
            LOGGER.warning("%s: %s", died.message, died.cause)
            raise died
        client = current_client()
        if client is not None and now - self._began >= self._next_stopped:
            self._next_stopped *= 2
            _warn_of_stopped(client)


def _warn_of_stopped(client: ManagerClient) -> None:
    running = engine.current()
    if running is None or running.folder is None or MARK not in os.environ:
        return
    pids = [pid for pid in processes_of(os.environ[MARK], str(running.folder)) if stat(pid).is_stopped]
    if not pids:
        return
    workers = _workers(client)
    for pid in pids:
        _JOB_LOGGER.warning("%s", spell_stopped(_named(pid, workers), pid))


def _workers(client: ManagerClient) -> Mapping[int, str]:
    """Return the workers of this machine by their pids; empty if the manager does not answer."""
    with suppress(RLinfError):
        peers = client.snapshot().peers
        return {peer.info.pid: name for name, peer in peers.items() if peer.info.place == own_place()}
    return {}


def _named(pid: int, workers: Mapping[int, str]) -> str:
    """Return a text such as `` `EnvGroup:0` (pid 7) ``, or one that tells which worker started the process."""
    if pid in workers:
        return f"`{workers[pid]}` (pid {pid})"
    parent = stat(pid).parent
    while parent > 1:
        if parent in workers:
            return f"process {pid}, which `{workers[parent]}` has started,"
        parent = stat(parent).parent
    return f"process {pid}"


T = TypeVar("T")

# Seconds after the first failure in which other ranks may fail, too, so that one error covers all of them.
_GRACE_SECONDS = 0.5
# Seconds to wait for the failures of deadlocked workers before the caller's own.
_CONSEQUENCE_SECONDS = 2.0
# Seconds between checks whether a wait was cancelled, or one of many calls failed.
_SLICE_SECONDS = 0.25
# With at most so many pending results, each one wakes `wait_together`, so that a failure is noticed at once.
_FEW_RESULTS = 8
# A wait is logged first after this many seconds, then at every doubling.
_FIRST_WORD_SECONDS = 60.0


class WorkerGroupHandle(GroupCall[T]):
    """The future results of one method on some ranks of a group.

    Waiting again returns the same results, or raises the same error, as long as the workers live.
    """

    def __init__(
        self, group: str, method: str, world_size: int, members: Sequence[GroupMember], references: list[Any]
    ) -> None:
        super().__init__(group, method, world_size, members, references)
        self._names = tuple(str(member.address) for member in members)
        self._kind = OperationKind.LAUNCH if method == "__init__" else OperationKind.CALL
        self._client = current_client()

    def wait(self, timeout: float | None = None) -> list[T]:
        """Return the results, in the order of the called ranks.

        Args:
            timeout: seconds; None means `RLINF_CALL_TIMEOUT`.

        Raises:
            WorkerGroupError: the method failed on a rank; it holds the exception of each failed rank. It is raised
                soon after the first failure, even if other ranks are still running.
            CommunicationTimeoutError: some ranks have not answered in time; waiting again is possible.
            ClusterError: the cluster was shut down.
        """
        if not self._settled:
            seconds = env_vars.CALL_TIMEOUT.get() if timeout is None else timeout
            client = self._connected()
            if client is None:
                self._wait(Deadline.after(seconds), None, 0)
            else:
                serial = client.operations.begin(
                    self._kind, self._title, peers=self._names, bounded=timeout is not None
                )
                try:
                    self._wait(Deadline.after(seconds), client, serial)
                finally:
                    client.operations.end(serial)
        return self._answer()

    def _connected(self) -> ManagerClient | None:
        client = current_client()
        if client is not self._client:
            raise no_cluster() if client is None else ClusterError(f"the cluster of {self._title} was shut down")
        return client

    def _wait(self, deadline: Deadline, client: ManagerClient | None, serial: int) -> None:
        ray = ray_api()
        started, word_after, watch = time.monotonic(), _FIRST_WORD_SECONDS, WaitWatch()
        first = deadline
        while not self._settled:
            try:
                self._settle(ray.get(self._references, timeout=deadline.sooner(_SLICE_SECONDS).remaining()))
            except ray.exceptions.GetTimeoutError:
                self._look_up(client, serial, watch)
                if self._settled:
                    return
                if deadline.expired and (deadline := _extended(first, client)).expired:
                    raise self._timeout(deadline.seconds, client, serial) from None
                waited = time.monotonic() - started
                if waited >= word_after:
                    pending = _spell(self.pending())
                    LOGGER.warning("%s: waiting for %s for %s", self._title, pending, spell_seconds(waited))
                    word_after *= 2
            except ray.exceptions.RayError:
                self._fail()

    def _look_up(self, client: ManagerClient | None, serial: int, watch: WaitWatch) -> None:
        """Check a wait between two slices: raise the error that ends it; settle the call if its hosts are gone."""
        failure = client.failure(serial) if client else None
        if failure is not None:
            # Workers of the same deadlock are notified at the same time: prefer their errors to this one.
            self._take(self._failures(_CONSEQUENCE_SECONDS))
            if self._settled:
                return
            raise failure from None
        check_call()
        watch.look()
        if self._vanished():
            self._fail()

    async def async_wait(self) -> list[T]:
        """Return the results as `wait` does with the default timeout, without blocking the event loop."""
        if not self._settled:
            client = self._connected()
            operations = client.operations if client else InflightOps()
            serial = operations.begin(self._kind, self._title, peers=self._names, task_key=current_task_key())
            answers = gather(self._references)
            try:
                await self._async_wait(answers, client, serial)
            finally:
                operations.end(serial)
                answers.cancel()
        return self._answer()

    async def _async_wait(self, answers: asyncio.Future[list[Any]], client: ManagerClient | None, serial: int) -> None:
        ray = ray_api()
        first = deadline = Deadline.after(env_vars.CALL_TIMEOUT.get())
        watch = WaitWatch()
        while not self._settled:
            done, _ = await asyncio.wait([answers], timeout=deadline.sooner(_SLICE_SECONDS).remaining())
            if done:
                try:
                    self._settle(answers.result())
                except ray.exceptions.RayError:
                    await asyncio.to_thread(self._fail)
                continue
            # In a thread: the check may briefly wait for Ray or the manager, which must not block the loop.
            await asyncio.to_thread(self._look_up, client, serial, watch)
            if deadline.expired and not self._settled:
                deadline = await asyncio.to_thread(_extended, first, client)
                if deadline.expired:
                    raise await asyncio.to_thread(self._timeout, deadline.seconds, client, serial)

    def __await__(self) -> Generator[Any, None, list[T]]:
        return self.async_wait().__await__()

    def cancel(self) -> None:
        """Cancel the call: drop it if it has not begun, else interrupt its waits. `wait` then raises.

        A method that computes runs to its end; its result is dropped.
        """
        pending = set(self.pending())
        if not pending:
            return
        # Not `ray.cancel`: an actor task that is dropped before it was sent leaves a gap in the actor's call order, and
        # the next call waits for it until Ray gives up and ends the worker.
        client = current_client()
        if client is not None:
            calls = {
                name: (reference.task_id().hex(),)
                for name, member, reference in zip(self._names, self._members, self._references, strict=True)
                if member.address in pending
            }
            client.cancel(calls)
        cancelled = {
            member.rank: CancelledOperationError(f"`{self._title}` was cancelled", where=str(member))
            for member in pending
        }
        self._take({**self._failures(0), **cancelled})
        # The caller of `cancel` knows the outcome.
        self.observed = True

    def abandon(self) -> None:
        """Cancel the call and ignore its outcome, even a failure before."""
        self.cancel()
        self.failure()
        self.observed = True

    def consume_durations(self, reduction_type: Reduction = "max", return_per_rank: bool = False) -> Any:
        """Return seconds by timer tag, of this call only; waits for it.

        Args:
            reduction_type: how the ranks' durations of a tag are combined.
            return_per_rank: whether to return a list of each rank's mapping instead.

        Raises:
            WorkerGroupError: the call failed.
        """
        self.wait()
        durations = self._durations or []
        reduced = reduce_durations(durations, reduction_type)
        return durations if return_per_rank else reduced

    def consume_duration(self, tag: str | None = None, reduction_type: Reduction = "max") -> float:
        """Return the seconds of one timer tag, of this call only; waits for it.

        Args:
            tag: the timer's tag; by default the method's name.
            reduction_type: how the ranks' durations are combined.

        Raises:
            WorkerGroupError: the call failed.
            KeyError: no timer of this tag ran in the call.
        """
        tag = self.method if tag is None else tag
        durations: dict[str, float] = self.consume_durations(reduction_type)
        if tag not in durations:
            tags = quoted(durations) or "none"
            raise KeyError(f"no timer `{tag}` ran in {self._title}; its timers: {tags}")
        return durations[tag]

    def _answer(self) -> list[T]:
        self.observed = True
        if self._error is not None:
            unanswered.tell_cause(self._error)
            raise self._error
        unanswered.forget(self)
        return cast("list[T]", self._results)

    def _fail(self) -> None:
        self._take(self._failures(_GRACE_SECONDS))

    def _timeout(self, seconds: float, client: ManagerClient | None, serial: int) -> CommunicationTimeoutError:
        picture = f"no answer from {_spell(self.pending())}"
        seen = client.wait_reports.picture_of(serial) if client else None
        return CommunicationTimeoutError(
            self._title,
            seconds,
            picture=f"{picture}: {seen}" if seen else picture,
            help="give `wait` a longer timeout; `rlinf ps` shows what each worker does",
        )


def _extended(deadline: Deadline, client: ManagerClient | None) -> Deadline:
    """Return an expired deadline, extended by the time in which a process of the job was being debugged."""
    now = time.monotonic()
    paused = 0.0 if client is None else client.wait_reports.paused("", now - deadline.at + deadline.seconds)
    at = deadline.at + paused
    return Deadline(deadline.seconds, at if at <= now else max(at, now + _SLICE_SECONDS))


def _spell(addresses: Sequence[WorkerAddress]) -> str:
    names = [f"`{address}`" for address in addresses]
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def wait_together(*handles: WorkerGroupHandle[Any]) -> list[list[Any]]:
    """Return the results of several interdependent calls, in the order of `handles`.

    Waiting for one after another would hang if a later call failed and an earlier one waited for it.

    Raises:
        WorkerGroupError: a call failed; if others failed in consequence, it is the root cause.
    """
    ray = ray_api()
    references = [reference for handle in handles for reference in handle.references]
    deadline = Deadline.after(env_vars.CALL_TIMEOUT.get())
    pending, watch = references, WaitWatch()
    while pending and not deadline.expired:
        check_call()
        watch.look()
        # Wait for many results at once to avoid a wake-up for each; a failure is then noticed within one slice.
        wanted = 1 if len(pending) <= _FEW_RESULTS else len(pending)
        seconds = deadline.sooner(_SLICE_SECONDS).remaining()
        _, pending = ray.wait(pending, num_returns=wanted, timeout=seconds, fetch_local=False)
        if pending and any(handle.failed for handle in handles):
            break
    results: list[list[Any]] = []
    errors: list[WorkerGroupError] = []
    for handle in handles:
        if pending and not handle.failed and not deadline.expired:
            continue  # another call has failed
        try:
            results.append(handle.wait(0 if pending else None))
        except WorkerGroupError as error:
            errors.append(error)
    if errors:
        raise min(errors, key=followed)
    return results
