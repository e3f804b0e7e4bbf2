"""The view of a job for `rlinf inspect workers`, from its manager's data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.manager.manager_messages import Hello, JobSnapshot, ProcessAnswer
from rlinf_core.manager.wait_graph import Process, Wait
from rlinf_core.manager.watch import processes_of
from rlinf_core.manager.worker_registry import WorkerRecord
from rlinf_core.waiting import RUNNING, OperationKind


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One process of a job, for people.

    Attributes:
        name: its address, or `driver`.
        node: where it runs, in words.
        pid: its process id, or None before it has started.
        state: `launching`, `ready`, `dead`, or `silent` if it did not answer.
        doing: its current activity, in words; `since`: its duration in seconds, or None.
        waits_for: the addresses or channels that it waits for.
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
    stacks: str = ""


def views(job: JobSnapshot) -> Iterator[WorkerView]:
    """Yield one view for each process: the driver first, then the workers in order of launch and rank."""
    processes = {process.name: process for process in processes_of(job.answers, job.dead)}
    for name in [*(name for name in job.peers if name not in job.workers), *job.workers]:
        hello, record = job.peers.get(name), job.workers.get(name)
        if hello is None:
            yield _absent(name, record, job.dead.get(name))
        elif name not in job.answers:
            yield _view(name, hello, "silent", "does not answer; native code may hold the GIL")
        else:
            yield _answered(name, hello, processes[name], job.answers[name])


def _absent(name: str, record: WorkerRecord[EndpointInfo] | None, died: float | None) -> WorkerView:
    node = (record.node if record else None) or ""
    if died is None:
        return WorkerView(name, node, None, None, "", "launching", "launching")
    cause = record.cause if record else None
    doing = f"died: {cause.splitlines()[0]}" if cause else "died: killed, or exited without an exception"
    return WorkerView(name, node, None, None, "", "dead", doing, died)


def _answered(name: str, hello: Hello, process: Process, answer: ProcessAnswer) -> WorkerView:
    attached = [wait for wait in process.waits if not wait.operation.detached]
    if attached:
        # The innermost operation is the current one.
        wait = attached[-1]
        words = f"{wait.operation.doing}, {wait.state}" if wait.state else wait.operation.doing
        return _view(name, hello, "ready", words, wait.age, _awaited(wait), answer.stacks)
    running = [operation for operation in answer.publication.operations if operation.operation.kind in RUNNING]
    if running:
        return _view(name, hello, "ready", running[-1].operation.doing, running[-1].age, stacks=answer.stacks)
    return _view(name, hello, "ready", "runs", stacks=answer.stacks)


def _awaited(wait: Wait) -> tuple[str, ...]:
    if wait.operation.kind is OperationKind.IDLE:
        return ()
    if wait.role:
        return (f"channel {wait.operation.target}", *wait.waits_for)
    return wait.waits_for


def _view(
    name: str,
    hello: Hello,
    state: str,
    doing: str,
    since: float | None = None,
    waits_for: tuple[str, ...] = (),
    stacks: str = "",
) -> WorkerView:
    return WorkerView(
        name, hello.node, hello.node_rank, hello.info.pid, hello.device, state, doing, since, waits_for, stacks
    )
