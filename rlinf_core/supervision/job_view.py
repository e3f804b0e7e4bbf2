"""A readable view of a job: the activity of each process, with stacks, and the processes that hold the job up.

A process holds the job up if it waits for no other process while nothing moves.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol, TypeAlias

from rlinf_core.config.secrets import mask_text
from rlinf_core.errors import RLinfError
from rlinf_core.node.process_life import Presence, UnprovenProcessError, look
from rlinf_core.node.stacks import NOT_PYTHON, ProcessStacks, StackRequest, children_of, read_stacks
from rlinf_core.process.proc import Stat, stat
from rlinf_core.suggest import quoted
from rlinf_core.supervision.lives import Hello, Life, WorkerRecord
from rlinf_core.supervision.wait_graph import Process, Wait
from rlinf_core.supervision.waits import ProcessAnswer, processes_of
from rlinf_core.waiting import RUNNING, OperationKind, spell_seconds

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


# Seconds between two snapshots, and the most processor seconds that a standing process uses between them.
_PAUSE: Final = 1.0
_IDLE: Final = 0.05
_FRAME: Final = re.compile(r'^\s*File "(.+)", (?:line (\d+), )?in (.+)$')
# Paths of library frames: code that called them is named instead, if there is any.
_LIBRARIES: Final = ("/site-packages/", "/lib/python", "/rlinf_core/", "<frozen ")
# Paths of calls in which a rank waits for the others.
_COLLECTIVE: Final = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/")
# States of proc_pid_stat(5): of a process whose main thread has ended; and of a process that runs or waits for a
# processor (R), or waits for a disk (D).
_ZOMBIE: Final = "Z"
_AT_WORK: Final = frozenset("RD")


class JobSource(Protocol):
    """The source of snapshots and stacks of a job."""

    def snapshot(self, *, stacks: bool) -> JobSnapshot: ...
    def read_stacks(self, helper: str, request: StackRequest, /) -> list[ProcessStacks]: ...


class Standing(NamedTuple):
    """A process that waits for no other process.

    Attributes:
        how: a description of the process and its activity.
        in_collective: whether it is in a collective operation, and so may wait for other ranks.
        is_debugged: whether it waits at a breakpoint.
    """

    name: str
    how: str
    in_collective: bool = False
    is_debugged: bool = False


def held_up(source: JobSource, *, certain_only: bool = False) -> list[Standing]:
    """Return the processes that hold up a job; none while any of its processes moves or is being launched.

    Two snapshots decide, a second apart: a job is held up if no operation of a worker began or ended between them, and
    the suspects, with the processes that they started, used no processor and no disk. A process that is stopped, or
    whose main thread has ended, is returned after the first snapshot.

    Args:
        certain_only: whether to take only the first snapshot.

    Raises:
        RLinfError: the job does not answer.
        OSError: a process cannot be read.
    """
    first = source.snapshot(stacks=False)
    certain = stopped_for_good(first)
    if certain or certain_only or any(worker.life is Life.LAUNCHING for worker in first.workers.values()):
        return certain
    before = _used(first)
    time.sleep(_PAUSE)
    second = source.snapshot(stacks=True)
    if _moved(first, second) or _worked(before, _used(second)):
        return []
    if first.answers.keys() - second.answers.keys():
        second = answers_of_both(source.snapshot(stacks=True), second)
    names = [name for name in suspected(second) if name in second.peers]
    return spell_standing(second, job_processes(second, names, native=False, remotely=source.read_stacks))


def stopped_for_good(job: JobSnapshot) -> list[Standing]:
    """Return the suspected workers of this machine that a signal has stopped, or that are zombies."""
    suspects = [name for name in suspected(job) if _is_here(job, name)]
    standing = [_no_longer_runs(name, job.peers[name].info.pid) for name in suspects]
    return [one for one in standing if one is not None]


def spell_standing(job: JobSnapshot, processes: Sequence[JobProcess]) -> list[Standing]:
    """Return a description of each process; processes in a collective operation only if there are no others."""
    standing = [_standing(job, process) for process in processes]
    # If some ranks wait in a collective operation, the others have not entered it, and hold it up.
    entered = [one for one in standing if one.in_collective]
    others = [one for one in standing if not one.in_collective]
    verb = "wait" if len(entered) > 1 else "waits"
    waiting = f"; {quoted(one.name for one in entered)} {verb} for it in a collective operation" if entered else ""
    return [one._replace(how=f"{one.how}{waiting}") for one in others] or entered


def suspected(job: JobSnapshot) -> Iterator[str]:
    """Yield the workers that wait for no other process: they are silent, run a method, or their reply is lost."""
    called = {name for answer in job.answers.values() for name in answer.in_flight}
    for name in job.workers:
        answer = job.answers.get(name)
        if answer is None or _current(answer) in RUNNING or (name in called and not answer.publication.operations):
            yield name


def _current(answer: ProcessAnswer) -> OperationKind | None:
    attached = [operation for operation in answer.publication.operations if not operation.detached]
    return attached[-1].kind if attached else None


def spell_stopped(process: str, pid: int | None) -> str:
    """Return the text that a process is stopped, with the command that continues it."""
    return f"{process} is stopped, as by SIGSTOP; `kill -CONT {pid}` continues it"


def _no_longer_runs(name: str, pid: int | None) -> Standing | None:
    shown = Stat() if pid is None else stat(pid)
    if shown.is_stopped:
        return Standing(name, spell_stopped(f"`{name}` (pid {pid})", pid))
    if shown.state == _ZOMBIE:
        words = "is a zombie: its main thread has ended, so that its methods never end"
        return Standing(name, f"`{name}` (pid {pid}) {words}")
    return None


def _standing(job: JobSnapshot, process: JobProcess) -> Standing:
    """Return a description of a process and its activity, with the innermost frame of user code."""
    view = process.view
    place = f"`{view.name}` (pid {view.pid})" if view.pid is not None else f"`{view.name}`"
    answer = job.answers.get(view.name)
    certain = _no_longer_runs(view.name, view.pid) if _is_here(job, view.name) else None
    if certain is not None:
        return certain
    if answer is not None and not answer.publication.operations:
        quiet = spell_seconds(answer.publication.quiet)
        return Standing(
            view.name,
            f"{place} does not run the method that is waited for, and has done nothing for {quiet}: the thread that"
            " ran it ended, or its reply is lost",
        )
    child = next((child for child in process.children if _innermost(child.stacks)), None)
    frame = _innermost(process.stacks)
    at = f", at {frame}" if frame else ""
    below = f"; its process {child.pid} is at {_innermost(child.stacks)}" if child is not None else ""
    if answer is None:
        reason = f" ({process.reason})" if process.reason else ""
        return Standing(
            view.name,
            f"{place} does not answer: native code holds the interpreter's lock{at or reason}{below}",
        )
    since = f" for {spell_seconds(view.since)}" if view.since is not None else ""
    collective = any(part in process.stacks for part in _COLLECTIVE) and not _own_frame_is_last(process.stacks)
    debugged = waits_at_breakpoint(job, view.name) is not None
    return Standing(view.name, f"{place} {view.doing}{since}{at}{below}", collective, debugged)


def _frames(stacks: str) -> list[tuple[str, str, str]]:
    """Return file, line and function of the calls, innermost last, of the thread with the most frames of user code."""
    threads: list[list[tuple[str, str, str]]] = []
    for line in stacks.splitlines():
        if line.startswith("thread "):
            threads.append([])
        elif (match := _FRAME.match(line)) is not None:
            if not threads:
                threads.append([])
            threads[-1].append((match[1], match[2] or "", match[3]))
    return max(threads, key=lambda frames: sum(map(_is_own, frames))) if threads else []


def _is_own(frame: tuple[str, str, str]) -> bool:
    return not any(part in frame[0] for part in _LIBRARIES)


def _own_frame_is_last(stacks: str) -> bool:
    """Return whether the innermost frame of user code called no library for collective operations."""
    frames = _frames(stacks)
    last = max((index for index, frame in enumerate(frames) if _is_own(frame)), default=-1)
    return not any(part in frame[0] for frame in frames[last + 1 :] for part in _COLLECTIVE)


def _innermost(stacks: str) -> str:
    """Return the innermost call in code of the user or a recipe, else in any, as `FILE:LINE in FUNCTION`."""
    frames = _frames(stacks)
    own = [frame for frame in frames if _is_own(frame)]
    if not frames:
        return ""
    file, line, function = (own or frames)[-1]
    return f"{file}:{line} in {function}" if line else f"{file} in {function}"


def _moved(first: JobSnapshot, second: JobSnapshot) -> bool:
    """Return whether any operation of a worker, or any process, began or ended between two snapshots."""
    if first.peers.keys() != second.peers.keys():
        return True
    both = first.workers.keys() & first.answers.keys() & second.answers.keys()
    return any(first.answers[name].publication.progress != second.answers[name].publication.progress for name in both)


def _used(job: JobSnapshot) -> Mapping[str, float]:
    """Return the processor seconds that each suspect of this machine has used, with the processes that it started;
    infinite while one of them runs or waits for a disk."""
    suspects = [name for name in suspected(job) if _is_here(job, name)]
    others = [peer.info.pid for peer in job.peers.values()]
    pids = {name: job.peers[name].info.pid for name in suspects}
    return {
        name: sum(map(_seconds, [pid, *(child for child, _ in children_of(pid, others))])) for name, pid in pids.items()
    }


def _worked(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    return any(not abs(after[name] - before[name]) <= _IDLE for name in before.keys() & after.keys())


def _is_here(job: JobSnapshot, name: str) -> bool:
    hello = job.peers.get(name)
    return hello is not None and hello.process is not None and look(hello.process) is not Presence.UNKNOWN


def _seconds(pid: int) -> float:
    shown = stat(pid)
    return float("inf") if shown.state in _AT_WORK else shown.ticks / os.sysconf("SC_CLK_TCK")
