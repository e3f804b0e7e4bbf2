"""A readable view of a job: the activity of each process, and the stacks of it and of the processes that it started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from rlinf_core.config.secrets import mask_text
from rlinf_core.errors import RLinfError
from rlinf_core.node.process_identity import Presence, UnprovenProcessError, look
from rlinf_core.node.stacks import NOT_PYTHON, ProcessStacks, StackRequest, read_stacks
from rlinf_core.supervision.lives import Hello, WorkerRecord
from rlinf_core.supervision.wait_graph import Process, Wait
from rlinf_core.supervision.waits import ProcessAnswer, processes_of
from rlinf_core.waiting import RUNNING, OperationKind

ReadStacks: TypeAlias = Callable[[str, StackRequest], list[ProcessStacks]]
"""Makes the named process of a job read stacks on its machine; raises RLinfError."""

_AT_ONCE: Final = 16
# The source of stacks that a process has reported itself.
ITSELF: Final = "itself"


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """A snapshot of the manager's data, for inspection from outside.

    Attributes:
        peers: the registered processes, by address; the driver is `driver`.
        workers: the processes of groups and channels, by address, in order of launch and rank.
        dead: the seconds since its death, by dead process.
        answers: the current operations of the processes that answered.
    """

    job: str
    peers: Mapping[str, Hello]
    workers: Mapping[str, WorkerRecord]
    dead: Mapping[str, float]
    answers: Mapping[str, ProcessAnswer]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The readable view of one process of a job.

    Attributes:
        name: its address, or `driver`.
        node: a description of the node where it runs.
        state: `launching`, `ready`, `dead`, or `silent` if it did not answer.
        doing: its current activity, as text.
        since: the duration of that activity in seconds, or None.
        waits_for: the addresses or channels that it waits for.
        holds: descriptions of further resources that it holds.
        stacks: the stacks of its threads, if requested.
    """

    name: str
    node: str
    node_rank: int | None
    pid: int | None
    device: str
    state: str
    doing: str
    since: float | None = None
    waits_for: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    stacks: str = ""


def views(job: JobSnapshot) -> Iterator[WorkerView]:
    """Yield one view for each process: the driver first, then the workers in order of launch and rank."""
    processes = {process.name: process for process in processes_of(job.answers, job.dead)}
    for name in [*(name for name in job.peers if name not in job.workers), *job.workers]:
        hello, record = job.peers.get(name), job.workers.get(name)
        if hello is None:
            yield _absent(name, record, job.dead.get(name))
            continue
        doing = "does not answer; native code may hold the GIL"
        view = WorkerView(name, hello.node, hello.node_rank, hello.info.pid, hello.device, "silent", doing)
        yield _answered(view, processes[name], job.answers[name]) if name in job.answers else view


def _absent(name: str, record: WorkerRecord | None, died: float | None) -> WorkerView:
    node = (record.node if record else None) or ""
    if died is None:
        return WorkerView(name, node, None, None, "", "launching", "launching")
    cause = record.cause if record else None
    doing = f"died: {cause.splitlines()[0]}" if cause else "died: killed, or exited without an exception"
    return WorkerView(name, node, None, None, "", "dead", doing, died)


def _answered(view: WorkerView, process: Process, answer: ProcessAnswer) -> WorkerView:
    view = replace(view, state="ready", doing="runs", stacks=answer.stacks, holds=answer.holds)
    attached = [wait for wait in process.waits if not wait.operation.detached]
    if attached:
        # The innermost operation is the current one.
        wait = attached[-1]
        words = f"{wait.operation.doing}, {wait.state}" if wait.state else wait.operation.doing
        return replace(view, doing=words, since=wait.operation.age, waits_for=_awaited(wait))
    running = [operation for operation in answer.publication.operations if operation.kind in RUNNING]
    return replace(view, doing=running[-1].doing, since=running[-1].age) if running else view


def _awaited(wait: Wait) -> tuple[str, ...]:
    if wait.operation.kind is OperationKind.IDLE:
        return ()
    if wait.role:
        return (f"channel {wait.operation.target}", *wait.waits_for)
    return wait.waits_for


@dataclass(frozen=True, slots=True)
class JobProcess:
    """One process of a job with its stacks.

    Attributes:
        source: the source of its stacks: `itself`, `py-spy`, `signal`, or empty without stacks.
        reason: why there are no stacks, or no native ones; else empty.
        children: the processes that it started, directly or indirectly.
    """

    view: WorkerView
    source: str
    stacks: str
    reason: str
    children: tuple[ProcessStacks, ...] = field(default=())

    @property
    def complete(self) -> bool:
        """Whether there are stacks of this process and of all Python processes that it started."""
        return bool(self.stacks) and all(child.stacks or child.reason == NOT_PYTHON for child in self.children)


def answers_of_both(first: JobSnapshot, second: JobSnapshot) -> JobSnapshot:
    """Return the second snapshot, completed by the answers of processes that answered only the first."""
    late = {name: answer for name, answer in first.answers.items() if name in second.peers}
    return replace(second, answers={**late, **second.answers})


def waits_at_breakpoint(job: JobSnapshot, name: str) -> str | None:
    """Return the place of the breakpoint at which a process waits, or None."""
    answer = job.answers.get(name)
    operations = answer.publication.operations if answer is not None else ()
    return next((one.target for one in operations if one.kind is OperationKind.BREAKPOINT), None)


def job_processes(
    job: JobSnapshot,
    names: Sequence[str],
    *,
    native: bool,
    remotely: ReadStacks,
) -> list[JobProcess]:
    """Return the named processes with their stacks, read in parallel.

    Args:
        job: the job, with the stacks of the processes that answered.
        native: whether native frames are wanted, too.
        remotely: reads stacks on other machines.
    """
    shown = {view.name: view for view in views(job)}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reading = [pool.submit(_process, job, shown[name], native, remotely) for name in names]
        return [read.result() for read in reading]


def _process(job: JobSnapshot, view: WorkerView, native: bool, remotely: ReadStacks) -> JobProcess:
    hello = job.peers.get(view.name)
    if hello is None:
        return JobProcess(view, "", "", "it has not started" if view.state == "launching" else view.doing)
    # A driver's children are processes of Ray, and below them the workers.
    is_worker = view.name in job.workers
    outside = native or not view.stacks
    read: list[ProcessStacks] = []
    reason = ""
    if outside or is_worker:
        try:
            read = _read(job, view.name, hello, outside, native, remotely)
        except UnprovenProcessError as error:
            reason = str(error)
        except OSError as error:
            reason = f"it has ended: {error.strerror}" if error.strerror else "it has ended"
        except RLinfError as error:
            reason = error.message
    children = tuple(_masked(stacks) for stacks in read if stacks.parent and is_worker)
    own = next((_masked(stacks) for stacks in read if not stacks.parent), None)
    if own is not None and own.stacks:
        return JobProcess(view, own.source, own.stacks, own.reason, children)
    reason = own.reason if own is not None else reason
    stacks = mask_text(view.stacks)
    if not stacks:
        return JobProcess(view, "", "", reason or "it does not answer", children)
    return JobProcess(view, ITSELF, stacks, reason if outside else "", children)


def _read(
    job: JobSnapshot, name: str, hello: Hello, own: bool, native: bool, remotely: ReadStacks
) -> list[ProcessStacks]:
    helper = helper_for(name, job.peers, set(job.answers))
    if hello.process is not None:
        others = tuple(peer.info.pid for peer in job.peers.values() if peer is not hello)
        request = StackRequest(hello.process, own, native, others)
        if look(hello.process) is Presence.ALIVE:
            return read_stacks(request)
        if helper is not None:
            return remotely(helper, request)
    raise UnprovenProcessError("no process of its machine answers, which could read its stacks")


def helper_for(name: str, peers: Mapping[str, Hello], answered: set[str]) -> str | None:
    """Return a process that can read the stacks of another one on its machine: itself if it answered; else None."""
    if name in answered:
        return name
    place = _place(peers[name])
    return next((other for other in sorted(answered) if other in peers and _place(peers[other]) == place), None)


def _place(hello: Hello) -> tuple[str, int]:
    process = hello.process
    return (process.boot, process.pid_namespace) if process is not None else hello.info.place


def _masked(stacks: ProcessStacks) -> ProcessStacks:
    return stacks._replace(command=mask_text(stacks.command), stacks=mask_text(stacks.stacks))
