"""The picture that `rlinf inspect workers` shows, from the answers of a round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlinf_core.collective.endpoint_info import EndpointInfo
from rlinf_core.manager.messages import Hello, ProcessAnswer, WorkerView
from rlinf_core.manager.wait_graph import Process, Wait
from rlinf_core.manager.watch import Round
from rlinf_core.manager.worker_registry import WorkerRecord
from rlinf_core.waiting import OperationKind


def views(
    round_: Round,
    parties: Mapping[str, Hello],
    workers: Mapping[str, WorkerRecord[EndpointInfo]],
    dead: Mapping[str, float],
) -> Iterator[WorkerView]:
    """Yield one view for each process: the driver first, then the workers in order of launch and rank."""
    processes = {process.name: process for process in round_.processes(dead)}
    for name in [*(name for name in parties if name not in workers), *workers]:
        hello, record = parties.get(name), workers.get(name)
        if hello is None:
            yield _absent(name, record, dead.get(name))
        elif name not in round_.answers:
            yield _view(name, hello, "silent", "does not answer: it may hold Python's lock in native code")
        else:
            yield _answered(name, hello, processes[name], round_.answers[name])


def _absent(name: str, record: WorkerRecord[EndpointInfo] | None, died: float | None) -> WorkerView:
    node = (record.node if record else None) or ""
    if died is None:
        return WorkerView(name, node, None, None, "", "launching", "is being launched")
    cause = record.cause if record else None
    doing = f"died: {cause.splitlines()[0]}" if cause else "died: it was killed, or exited without an exception"
    return WorkerView(name, node, None, None, "", "dead", doing, died)


def _answered(name: str, hello: Hello, process: Process, answer: ProcessAnswer) -> WorkerView:
    attached = [wait for wait in process.waits if not wait.operation.detached]
    if attached:
        # The innermost one is what the process is in now.
        wait = attached[-1]
        words = f"{wait.operation.doing}, {wait.state}" if wait.state else wait.operation.doing
        return _view(name, hello, "ready", words, wait.age, _awaited(wait), answer.stacks)
    methods = [one for one in answer.publication.operations if one.operation.kind is OperationKind.METHOD]
    if methods:
        return _view(
            name, hello, "ready", f"runs `{methods[-1].operation.target}`", methods[-1].age, stacks=answer.stacks
        )
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
