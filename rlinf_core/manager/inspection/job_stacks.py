"""The stacks of a job's processes, of those that they started, and the reasons why there are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from rlinf_core.config.secrets import mask_text
from rlinf_core.errors import RLinfError
from rlinf_core.manager.inspection.job_workers import WorkerView, views
from rlinf_core.manager.manager_messages import Hello, JobSnapshot, ReadStacks
from rlinf_core.node.process_identity import Presence, UnprovenProcessError, look
from rlinf_core.node.stacks.process_stacks import NOT_PYTHON, ProcessStacks, StackRequest, read_stacks
from rlinf_core.waiting import OperationKind

_AT_ONCE: Final = 16
# How the stacks of a process that answers come.
ITSELF: Final = "itself"


@dataclass(frozen=True, slots=True)
class JobProcess:
    """One process of a job with its stacks.

    Attributes:
        view: what it does.
        source: who read its stacks: `itself`, `py-spy`, `signal`, or empty without any.
        stacks: the stacks of its threads.
        reason: why there are none, or no native ones; else empty.
        children: the processes that it started, directly or not.
    """

    view: WorkerView
    source: str
    stacks: str
    reason: str
    children: tuple[ProcessStacks, ...] = field(default=())

    @property
    def complete(self) -> bool:
        """Whether there are stacks of it and of all Python processes that it started."""
        return bool(self.stacks) and all(child.stacks or child.reason == NOT_PYTHON for child in self.children)


def answers_of_both(first: JobSnapshot, second: JobSnapshot) -> JobSnapshot:
    """Return the second snapshot, with the answers of processes that answered the first one alone."""
    late = {name: answer for name, answer in first.answers.items() if name in second.peers}
    return replace(second, answers={**late, **second.answers})


def waits_at_breakpoint(job: JobSnapshot, name: str) -> str | None:
    """Return the place of the breakpoint at which a process waits, or None."""
    answer = job.answers.get(name)
    operations = answer.publication.operations if answer is not None else ()
    return next((one.operation.target for one in operations if one.operation.kind is OperationKind.BREAKPOINT), None)


def job_processes(
    job: JobSnapshot,
    names: Sequence[str],
    *,
    native: bool,
    remotely: Callable[[ReadStacks], list[ProcessStacks]],
) -> list[JobProcess]:
    """Return the named processes with their stacks, all read at once.

    Args:
        job: the job, with the stacks of the processes that answered.
        names: the processes.
        native: whether native frames are wanted too.
        remotely: has a process of another machine read stacks; raises RLinfError.
    """
    shown = {view.name: view for view in views(job)}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reading = [pool.submit(_process, job, shown[name], native, remotely) for name in names]
        return [read.result() for read in reading]


def _process(
    job: JobSnapshot, view: WorkerView, native: bool, remotely: Callable[[ReadStacks], list[ProcessStacks]]
) -> JobProcess:
    hello = job.peers.get(view.name)
    if hello is None:
        return JobProcess(view, "", "", "it has not started" if view.state == "launching" else view.doing)
    # A driver's children are Ray's processes, and the workers through them.
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
    job: JobSnapshot,
    name: str,
    hello: Hello,
    own: bool,
    native: bool,
    remotely: Callable[[ReadStacks], list[ProcessStacks]],
) -> list[ProcessStacks]:
    if hello.process is not None and look(hello.process) is Presence.ALIVE:
        others = tuple(peer.info.pid for peer in job.peers.values() if peer is not hello)
        return read_stacks(StackRequest(hello.process, own, native, others))
    helper = helper_for(name, job.peers, set(job.answers))
    if helper is None:
        raise UnprovenProcessError("no process of its machine answers, which could read its stacks")
    return remotely(ReadStacks(name, helper, own, native))


def helper_for(name: str, peers: Mapping[str, Hello], answered: set[str]) -> str | None:
    """Return the process that reads the stacks of another one, on the same machine; itself if it answers."""
    if name in answered:
        return name
    place = _place(peers[name])
    return next((other for other in sorted(answered) if other in peers and _place(peers[other]) == place), None)


def _place(hello: Hello) -> tuple[str, int]:
    process = hello.process
    return (process.boot, process.pid_namespace) if process is not None else (hello.info.host, -hello.info.network)


def _masked(stacks: ProcessStacks) -> ProcessStacks:
    return stacks._replace(command=mask_text(stacks.command), stacks=mask_text(stacks.stacks))
