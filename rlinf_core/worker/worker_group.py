"""Workers of one class, launched and called as a group.

This module defines what a program can do with a group. The start of workers, calls, waits and deaths are elsewhere
(`launch`, `handle`, `supervision.deaths`). Functions over several groups are here because they use private
attributes of groups.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from rlinf_core import env_vars
from rlinf_core.address import WorkerAddress
from rlinf_core.channel.channel import Channel
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.cluster.driver_job import claim, give_back
from rlinf_core.cluster.engine import on_disconnect
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.config.ranks import format_ranks
from rlinf_core.context import WorkerInfo, current_session
from rlinf_core.errors import InvalidNameError, RLinfError, RuntimeFailure, WorkerDiedError
from rlinf_core.failures import SHUT_DOWN, WorkerGroupError, ended_by_shutdown, raise_unseen
from rlinf_core.placement.strategy import PlacementStrategy
from rlinf_core.process.activity import Taken
from rlinf_core.process.proc import Peak
from rlinf_core.suggest import as_index, did_you_mean, short_repr
from rlinf_core.supervision.client import current_client
from rlinf_core.worker.calls import GroupCall, GroupMember, unanswered
from rlinf_core.worker.communication import Communication
from rlinf_core.worker.group_view import GroupMethod, GroupView
from rlinf_core.worker.handle import WorkerGroupHandle, wait_together
from rlinf_core.worker.launch import Launch, LaunchPlan, close_group, kill, release_name, running_members
from rlinf_core.worker.timer import CallRecord

# Covariant, so that a loop can declare the methods it calls by a protocol.
W = TypeVar("W", covariant=True)
V = TypeVar("V")

# The grace periods for computing workers; waiting ones are interrupted at once.
_SHUTDOWN_SECONDS = 2.0
_EXIT_SECONDS = 0.5
# The time limit for answers that are in transit when every worker has closed.
_LATE_SECONDS = 0.2

# The groups that this process launched and has not shut down.
_running: weakref.WeakSet[WorkerGroup[Any]] = weakref.WeakSet()
# The names of groups that this process has shut down.
_shut_down: set[str] = set()


class WorkerGroup(Generic[W]):
    """A group of workers. Every public method of the user's class is a method of the group that returns a handle.

    Made by `MyWorker.create_group(...)`, a group has no processes before `launch`. As a context manager, it shuts down
    at the end of the block.
    """

    def __init__(self, worker_class: type[W], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.worker_class = cast("type[Communication]", worker_class)
        self._arguments = (args, kwargs)
        self._methods = self.worker_class._rlinf_methods()  # pyright: ignore[reportPrivateUsage] - the runtime's own
        self._name: str | None = None
        self._members: tuple[GroupMember, ...] = ()
        self._incarnation = 0
        # The plan by which single ranks are launched again; None for a group that another process launched.
        self._plan: LaunchPlan | None = None
        reserved = sorted(self._methods & set(dir(WorkerGroup)))
        if reserved:
            raise InvalidNameError(
                f"`{worker_class.__name__}.{reserved[0]}` cannot be called on a group",
                why="the name is taken by an attribute of groups",
                help="rename the method",
            )

    def __repr__(self) -> str:
        kind = self.worker_class.__name__
        if not self._members:
            return f"<WorkerGroup of {kind}, not running>"
        count = len(self._members)
        return f"<WorkerGroup {self.worker_group_name}: {count} {kind} worker{'' if count == 1 else 's'}>"

    def launch(
        self,
        cluster: Cluster,
        placement_strategy: PlacementStrategy | str | Mapping[str, Any] | None = None,
        name: str | None = None,
        isolate_accelerator: bool = True,
        max_concurrency: int | None = None,
    ) -> Self:
        """Start all workers at once, and return when every one of them is constructed.

        Args:
            cluster: the cluster.
            placement_strategy: the placement: a strategy, or an entry as under `cluster.component_placement` of a file,
                such as the rank map `0:0-3`; by default one process per accelerator, else one per node.
            name: the group's name for peers; by default `group_name` in the class's section of the configuration
                (`Worker.config_section`), else in a worker its address, of which the workers become children, and in
                the driver `Worker_group_` plus the class's name.
            isolate_accelerator: whether a worker sees only its assigned accelerators.
            max_concurrency: the number of methods of one worker that may run concurrently, on separate threads; by
                default one after another on the main thread.

        Raises:
            WorkerGroupError: a constructor raised; it holds the exceptions by rank. No process is left.
            RuntimeFailure: this group, or another of its name, is already running.
            PlacementError: the cluster cannot hold the processes as asked.
            ValueError: `max_concurrency` is not an integer >= 1.
            PayloadError: the class or an argument does not pickle.
        """
        self._check_idle()
        arguments = (placement_strategy, name, isolate_accelerator, max_concurrency)
        _launch_all([(self, LaunchPlan(cluster, self.worker_class, self._arguments, *arguments))], [])
        return self

    def _check_idle(self) -> None:
        if self._members:
            raise RuntimeFailure(
                f"group `{self._name}` is already running", help="shut it down first, or create another"
            )

    def _begin(self, plan: LaunchPlan) -> Launch:
        launch = Launch(plan)
        self._name, self._plan = str(plan.base), plan
        return launch

    def relaunch(self, *ranks: int) -> None:
        """Start new processes in place of workers, and return when they are constructed. Living workers are ended.

        The new workers get the places, addresses and arguments of the old ones, but not their state. Later calls on the
        group reach them. Views and handles made before do not; nor does torch.distributed, so that a group that uses
        it must be launched as a whole.

        Raises:
            RuntimeFailure: the group was not launched by this process.
            ValueError: there is no such rank; no worker was ended.
            WorkerGroupError: a constructor raised, or a new process died. None of the new workers is left.
            ClusterError: a node left the cluster.
        """
        self._check_ranks(ranks)
        plan, members = self._plan, {member.address.rank: member for member in self._running}
        session = current_session()
        if plan is None or session is None:
            raise RuntimeFailure(f"group `{self._name}` was not launched by this process")
        launches: list[Launch] = []
        try:
            for rank in dict.fromkeys(ranks):
                release_name(members[rank].actor, str(members[rank].address), session.job)
                launches.append(Launch(plan, again=rank))
            pids = wait_together(*(launch.construct() for launch in launches))
        except BaseException:
            for launch in launches:
                launch.abandon()
            raise
        members |= {
            member.address.rank: member
            for launch, own in zip(launches, pids, strict=True)
            for member in launch.members(own)
        }
        self._members = tuple(members[rank] for rank in sorted(members))

    def _take(self, members: tuple[GroupMember, ...]) -> None:
        self._members = members
        self._incarnation = members[0].incarnation
        _running.add(self)
        _shut_down.discard(self.worker_group_name)
        on_disconnect(_end_all)

    @classmethod
    def from_group_name(cls, worker_class: type[V], name: str) -> WorkerGroup[V]:
        """Return the running group of this name, launched by any process of the job.

        Raises:
            UnknownGroupError: no group of the name runs.
            InvalidNameError: it is not the name of a group, or that of a channel.
            WorkerDiedError: one of its workers is dead.
        """
        session, client = current_session(), current_client()
        base, group = WorkerAddress.from_name(name), WorkerGroup(worker_class, (), {})
        if session is None or client is None:
            raise RuntimeFailure("this process belongs to no job", help="make a `Cluster` and launch a group first")
        life = client.group_life(name, env_vars.CONNECT_TIMEOUT.get())
        if life.channel:
            raise InvalidNameError(f"`{name}` is a channel, not a worker group", help="use `Channel.connect`")
        members = running_members(base, life, session.job)
        group._name, group._members, group._incarnation = name, members, life.incarnation
        return group

    def __getattr__(self, name: str) -> GroupMethod:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.check_method(name)
        return GroupMethod(GroupView(self, self._running), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._methods})

    def check_method(self, name: str) -> None:
        """Raise AttributeError unless the user's class has a public method of this name."""
        if name not in self._methods:
            hint = did_you_mean(name, self._methods)
            raise AttributeError(
                f"a group of `{self.worker_class.__name__}` has no method `{name}`" + (f"; {hint}" if hint else "")
            )

    @property
    def methods(self) -> frozenset[str]:
        """The names of the group's methods: the public methods of the user's class."""
        return self._methods

    @property
    def worker_info_list(self) -> list[WorkerInfo]:
        """The node and the devices of each worker, by rank; waits until no worker runs a method."""
        return self._asked("worker_info").wait()

    @property
    def _running(self) -> tuple[GroupMember, ...]:
        if not self._members:
            raise RuntimeFailure(
                f"the group of `{self.worker_class.__name__}` is not running",
                help="`launch` it before calling its methods",
            )
        return self._members

    @property
    def worker_group_name(self) -> str:
        """The group's name for peers."""
        return self._name or f"Worker_group_{self.worker_class.__name__}"

    @property
    def world_size(self) -> int:
        """The number of workers; 0 before it is launched."""
        return len(self._members)

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """The addresses of the workers, by rank."""
        return tuple(member.address for member in self._members)

    def execute_on(self, *ranks: int) -> GroupView:
        """Return a view of these ranks; its results are in the given order. The group itself is unchanged.

        Raises:
            ValueError: there is no such rank.
        """
        self._check_ranks(ranks)
        return GroupView(self, [self._running[rank] for rank in ranks])

    def _check_ranks(self, ranks: Sequence[int]) -> None:
        size = len(self._running)
        for rank in ranks:
            number = as_index(rank)
            if number is None or not 0 <= number < size:
                form = "" if number is not None else "; write each rank as an integer argument, as in `(0, 1)`"
                raise ValueError(
                    f"`{self._name}` has no rank {short_repr(rank)}, only {format_ranks(range(size))}{form}"
                )

    def take_spans(self) -> WorkerGroupHandle[Taken]:
        """Return the spans that each worker recorded since the last call, once it runs no method.

        Workers record spans if `Cluster.record(trace=True)` was called before the launch.
        """
        return self._asked("take_spans")

    def memory_peaks(self) -> WorkerGroupHandle[dict[str, Peak]]:
        """Return the peak memory of each worker by method, once it runs no method."""
        return self._asked("memory_peaks")

    def call_records(self) -> WorkerGroupHandle[list[CallRecord]]:
        """Return the durations of each worker's timed calls, by tag and rows, once it runs no method."""
        return self._asked("call_records")

    def start_profile(self, kind: str, folder: str, name: str) -> WorkerGroupHandle[None]:
        """Begin to profile each worker, once it runs no method, into `FOLDER/NAME-RANK.json` on its node."""
        return self._asked("start_profile", kind, f"{folder}/{name}")

    def stop_profile(self) -> WorkerGroupHandle[None]:
        """Write the profile of each worker, once it runs no method."""
        return self._asked("stop_profile")

    def _asked(self, question: str, *args: object) -> WorkerGroupHandle[Any]:
        """Call a method of the actor in each worker's process, not of the worker itself."""
        members = self._running
        references = [getattr(member.actor, question).remote(*args) for member in members]
        return WorkerGroupHandle(self.worker_group_name, question, len(members), members, references)

    def drop_messages(self, other: WorkerGroup[Any]) -> None:
        """Drop all messages that the workers of two groups sent each other and that were not received.

        Needed before an exchange that failed halfway is repeated. No running call may send from one group to the
        other; cancelled calls end first.

        Raises:
            WorkerGroupError: a worker has died.
        """
        mark = f"rlinf-dropped-{secrets.token_hex(8)}"
        sides = [(self, tuple(map(str, other.addresses))), (other, tuple(map(str, self.addresses)))]
        # First fail all pending receives everywhere: one of them would take the mark.
        wait_together(*(group._asked("fail_exchange", peers) for group, peers in sides))
        wait_together(*(group._asked("drop_messages", peers, mark) for group, peers in sides))

    def shutdown(self) -> None:
        """End the workers and release their names. Idempotent.

        Raises:
            WorkerGroupError: a call whose result was never read had failed.
        """
        raise_unseen(self._end(_SHUTDOWN_SECONDS))

    def _end(self, seconds: float) -> list[WorkerGroupError]:
        """End the workers; return the failures of calls whose results were never read.

        A computing worker has a grace period; a waiting one is interrupted at once.
        """
        ray = ray_api()
        members, self._members = self._members, ()
        _running.discard(self)
        if not ray.is_initialized() or not members:
            return []
        name = self.worker_group_name
        _shut_down.add(name)
        calls = [call for call in unanswered.take(name) if not call.observed]
        unseen: list[WorkerGroupError] = []
        late: list[GroupCall[Any]] = []
        for call in calls:
            # Before `failure`: an answer that arrives between the two is read below.
            pending = call.pending()
            if (failure := call.failure()) is not None:
                unseen += [] if _follows_shutdown(failure) else [failure]
            elif pending:
                late.append(call)
        client = current_client()
        if client is not None:
            client.dismiss({str(member.address): member.incarnation for member in members})
        close_group(name, self._incarnation)
        closing = [member.actor.close.remote() for member in members]
        ray.wait(closing, num_returns=len(closing), timeout=seconds)
        # Ray may deliver the answer of an earlier call after that of a later one.
        unseen += [
            failure
            for call in late
            if (failure := call.failure(_LATE_SECONDS)) is not None and not ended_by_shutdown(failure)
        ]
        kill([member.actor for member in members])
        if self._plan is not None:
            # The processes have copies of the claims: the devices are free when the last process has ended.
            give_back(self._plan.use)
        for call in calls:
            call.failure()
        return unseen

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        raise_unseen(self._end(_SHUTDOWN_SECONDS), instead_of=error)


def _follows_shutdown(failure: WorkerGroupError) -> bool:
    """Return whether a call failed on each rank because this process had shut another group down before."""
    return all(
        isinstance(error, WorkerDiedError)
        and error.cause == SHUT_DOWN
        and WorkerAddress.from_name(error.address).root_group_name in _shut_down
        for error in failure.exceptions
    )


def end_worker(group: WorkerGroup[Any], rank: int, cause: str) -> None:
    """Kill a worker, whatever it does; operations that wait for it fail with its death and this cause.

    Raises:
        RuntimeFailure: the group is not running.
    """
    member = next(member for member in group._running if member.address.rank == rank)  # pyright: ignore[reportPrivateUsage] - this module's own
    client = current_client()
    if client is not None:
        client.will_end(str(member.address), member.incarnation, cause)
    kill([member.actor])


def launch_together(
    cluster: Cluster, groups: Mapping[WorkerGroup[Any], PlacementStrategy | None], channels: Sequence[str] = ()
) -> list[Channel]:
    """Launch several groups in parallel; return the channels when every worker is constructed.

    It takes as long as the slowest group; sequential calls of `WorkerGroup.launch` take the sum.

    Args:
        cluster: the cluster.
        groups: the groups with their placements; None as in `WorkerGroup.launch`.
        channels: the names of new channels, whose processes start in parallel on node 0.

    Raises:
        Exception: as for `WorkerGroup.launch` and `Channel.create`; then none of the groups is running.
    """
    plans: list[tuple[WorkerGroup[Any], LaunchPlan]] = []
    for group, strategy in groups.items():
        group._check_idle()  # pyright: ignore[reportPrivateUsage] - this module's own
        plans.append((group, LaunchPlan(cluster, group.worker_class, group._arguments, strategy)))  # pyright: ignore[reportPrivateUsage] - this module's own
    # Claim the devices of all groups at once: a job that holds some devices must not wait for others.
    use = object()
    claim(cluster, [placement for _, plan in plans for placement in plan.placements], use)
    try:
        with ThreadPoolExecutor(len(channels) or 1, "rlinf-channel") as pool:
            return _launch_all(plans, [pool.submit(Channel.create, name) for name in channels])
    finally:
        # By now the groups have claims of their own on the devices.
        give_back(use)


def _launch_all(
    plans: Sequence[tuple[WorkerGroup[Any], LaunchPlan]], channels: Sequence[Future[Channel]]
) -> list[Channel]:
    launches: list[Launch] = []
    try:
        for group, plan in plans:
            launches.append(group._begin(plan))  # pyright: ignore[reportPrivateUsage] - this module's own
        pids = wait_together(*[launch.construct() for launch in launches])
        created = [channel.result() for channel in channels]
    except BaseException:
        for launch in launches:
            launch.abandon()
        for channel in channels:
            with suppress(RLinfError):
                channel.result().close()
        raise
    for (group, _), launch, own in zip(plans, launches, pids, strict=True):
        group._take(launch.members(own))  # pyright: ignore[reportPrivateUsage] - this module's own
    return created


def _end_all() -> list[WorkerGroupError]:
    groups = list(_running)
    return [failure for group in groups for failure in group._end(_EXIT_SECONDS)]  # pyright: ignore[reportPrivateUsage] - this module's own
