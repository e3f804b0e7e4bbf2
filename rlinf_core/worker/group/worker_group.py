"""Workers of one class, launched and called as a group.

Its one reason to change is what a program may do with a group. What a launch starts, how workers start, are called,
are waited for and end is elsewhere (`launch`, `handle`, `watchers`, `supervision.deaths`). Functions over
several groups are here because they use what is private to a group.
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
from rlinf_core.cluster.claiming import claim, give_back
from rlinf_core.cluster.cluster import Cluster
from rlinf_core.cluster.engine import on_disconnect
from rlinf_core.cluster.ray_api import ray_api
from rlinf_core.config.ranks import format_ranks
from rlinf_core.context import WorkerInfo, current_session
from rlinf_core.errors import InvalidNameError, RLinfError, RuntimeFailure
from rlinf_core.failures import WorkerGroupError, ended_by_shutdown, raise_unseen
from rlinf_core.placement.strategy import PlacementStrategy
from rlinf_core.process.proc import Peak
from rlinf_core.process.tracing import Taken
from rlinf_core.suggest import as_index, did_you_mean, short_repr
from rlinf_core.supervision.client import current_client
from rlinf_core.worker.calls import CallRecord
from rlinf_core.worker.communication import Communication
from rlinf_core.worker.group.group_view import GroupMethod, GroupView
from rlinf_core.worker.group.handle import WorkerGroupHandle, wait_together
from rlinf_core.worker.group.launch import Launch, LaunchPlan, close_group, kill, release_name, running_members
from rlinf_core.worker.group_call import GroupCall, GroupMember
from rlinf_core.worker.unanswered_calls import unanswered

# Covariant, so that a loop can declare the methods it calls by a protocol.
W = TypeVar("W", covariant=True)
V = TypeVar("V")

# For a computing worker; a waiting one is interrupted at once.
_SHUTDOWN_SECONDS = 2.0
_EXIT_SECONDS = 0.5
# For answers that are under way when every worker has closed.
_LATE_SECONDS = 0.2

# The groups that this process launched and has not shut down.
_running: weakref.WeakSet[WorkerGroup[Any]] = weakref.WeakSet()


class WorkerGroup(Generic[W]):
    """A group of workers. Every public method of the user's class is a method of the group that returns a handle.

    Made by `MyWorker.create_group(...)`, it has no processes before `launch`. As a context manager it shuts down at the
    end of the block.
    """

    def __init__(self, worker_class: type[W], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.worker_class = cast("type[Communication]", worker_class)
        self._arguments = (args, kwargs)
        self._methods = self.worker_class._rlinf_methods()  # pyright: ignore[reportPrivateUsage] - the runtime's own
        self._name: str | None = None
        self._members: tuple[GroupMember, ...] = ()
        self._incarnation = 0
        # Says how one rank is launched in place of a dead process; None for a group of another process.
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
        """Start new processes in place of workers, and return when they are constructed. Living ones are ended.

        They get the places, addresses and arguments of those before them, and none of their state. Calls on the group
        reach them from now on. Views and handles made earlier, and processes that torch.distributed connects, do not:
        a group that uses it is launched as a whole.

        Raises:
            RuntimeFailure: the group was not launched by this process.
            WorkerGroupError: a constructor raised, or a new process died. The others of `ranks` run.
            ClusterError: a node left the cluster.
        """
        plan, members = self._plan, {member.address.rank: member for member in self._running}
        session = current_session()
        if plan is None or session is None:
            raise RuntimeFailure(f"group `{self._name}` was not launched by this process")
        launches: list[Launch] = []
        try:
            for rank in ranks:
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
        on_disconnect(_end_all)

    @classmethod
    def from_group_name(cls, worker_class: type[V], name: str) -> WorkerGroup[V]:
        """Return the running group of this name, launched by any process of the job.

        Raises:
            UnknownGroupError: no group of the name runs.
            WorkerDiedError: one of its workers is dead.
        """
        session, client = current_session(), current_client()
        group = WorkerGroup(worker_class, (), {})
        if session is None or client is None:
            raise RuntimeFailure("this process belongs to no job", help="make a `Cluster` and launch a group first")
        life = client.group_life(name, env_vars.CONNECT_TIMEOUT.get())
        members = running_members(WorkerAddress.from_name(name), life, session.job)
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
                f"`{self.worker_class.__name__}` has no public method `{name}`" + (f"; {hint}" if hint else "")
            )

    @property
    def methods(self) -> frozenset[str]:
        """The names of the group's methods: the public methods of the user's class."""
        return self._methods

    @property
    def worker_info_list(self) -> list[WorkerInfo]:
        """The node and the devices of each worker, by rank. Workers answer between two calls."""
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
        """The workers, by rank."""
        return tuple(member.address for member in self._members)

    def execute_on(self, *ranks: int) -> GroupView:
        """Return a view of these ranks; results are in the given order. The group itself is unchanged.

        Raises:
            ValueError: there is no such rank.
        """
        members = self._running
        for rank in ranks:
            number = as_index(rank)
            if number is None or not 0 <= number < len(members):
                valid = format_ranks(range(len(members)))
                raise ValueError(f"`{self._name}` has no rank {short_repr(rank)}, only {valid}")
        return GroupView(self, [members[rank] for rank in ranks])

    def take_spans(self) -> WorkerGroupHandle[Taken]:
        """Return the spans that each worker recorded since the last call, once it is in no method.

        `Cluster.record(trace=True)` before the launch makes them record.
        """
        return self._asked("take_spans")

    def memory_peaks(self) -> WorkerGroupHandle[dict[str, Peak]]:
        """Return the peak memory of each worker by method, once it runs none."""
        return self._asked("memory_peaks")

    def call_records(self) -> WorkerGroupHandle[list[CallRecord]]:
        """Return the durations of each worker's timed calls, by tag and rows, once it runs no method."""
        return self._asked("call_records")

    def start_profile(self, kind: str, folder: str, name: str) -> WorkerGroupHandle[None]:
        """Begin to profile each worker, once it runs no method, into `FOLDER/NAME-RANK.json` on its node."""
        return self._asked("start_profile", kind, f"{folder}/{name}")

    def stop_profile(self) -> WorkerGroupHandle[None]:
        """Write the profile of each worker, once it is in no method."""
        return self._asked("stop_profile")

    def _asked(self, question: str, *args: object) -> WorkerGroupHandle[Any]:
        """Call a method of the actor in each worker's process, not of the worker itself."""
        members = self._running
        references = [getattr(member.actor, question).remote(*args) for member in members]
        return WorkerGroupHandle(self.worker_group_name, question, len(members), members, references)

    def drop_messages(self, other: WorkerGroup[Any]) -> None:
        """Have the workers of two groups forget all that they sent each other and nobody received.

        For an exchange that is to be done again after it failed in its midst. No call may be under way that sends from
        one group to the other; cancelled calls end first.

        Raises:
            WorkerGroupError: a worker has died.
        """
        mark = f"rlinf-dropped-{secrets.token_hex(8)}"
        sides = [(self, tuple(map(str, other.addresses))), (other, tuple(map(str, self.addresses)))]
        # No one sends its mark before the receives that would take it are gone everywhere.
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
        calls = [call for call in unanswered.take(name) if not call.observed]
        unseen: list[WorkerGroupError] = []
        late: list[GroupCall[Any]] = []
        for call in calls:
            # Asked first: an answer that arrives between the two questions is read below.
            pending = call.pending()
            if (failure := call.failure()) is not None:
                unseen.append(failure)
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
            # Its processes have copies, with the last of which the devices are free.
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


def end_worker(group: WorkerGroup[Any], rank: int, cause: str) -> None:
    """Kill a worker, whatever it does; those who wait for it get its death with this cause.

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

    It takes as long as the slowest group, while sequential `WorkerGroup.launch` takes the sum.

    Args:
        cluster: the cluster.
        groups: the groups with their placements; None as in `WorkerGroup.launch`.
        channels: names of new channels, whose processes start in parallel on node 0.

    Raises:
        Exception: as for `WorkerGroup.launch` and `Channel.create`. None of the groups is running then.
    """
    plans: list[tuple[WorkerGroup[Any], LaunchPlan]] = []
    for group, strategy in groups.items():
        group._check_idle()  # pyright: ignore[reportPrivateUsage] - this module's own
        plans.append((group, LaunchPlan(cluster, group.worker_class, group._arguments, strategy)))  # pyright: ignore[reportPrivateUsage] - this module's own
    # Of all groups at once: who holds some devices cannot wait for others.
    use = object()
    claim(cluster, [placement for _, plan in plans for placement in plan.placements], use)
    try:
        with ThreadPoolExecutor(len(channels) or 1, "rlinf-channel") as pool:
            return _launch_all(plans, [pool.submit(Channel.create, name) for name in channels])
    finally:
        # The groups use them now.
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
