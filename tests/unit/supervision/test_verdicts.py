"""Who holds up a run, of what its processes say of themselves and what is read of them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.node.process_life import identity_here
from rlinf_core.node.stacks import ProcessStacks, StackRequest
from rlinf_core.process.proc import stat
from rlinf_core.supervision import job_view
from rlinf_core.supervision.job_view import JobSnapshot, Standing, held_up
from rlinf_core.supervision.lives import Life, WorkerRecord
from rlinf_core.supervision.waits import ProcessAnswer
from rlinf_core.waiting import Operation, OperationKind, Publication
from tests.unit.cli.test_job_processes import hello
from tests.waiting import until

CALLED = 'thread MainThread:\n  File "/rlinf_core/worker/calls.py", line 5, in call'
OWN = f'{CALLED}\n  File "/home/me/env.py", line 12, in step'
REDUCES = f'{OWN}\n  File "/site-packages/torch/distributed/c10d.py", line 9, in all_reduce'
WAITS_IN_PYTHON = f'{OWN}\n  File "/usr/lib/python3.11/threading.py", line 320, in wait'


def answer(stacks: str, kind: OperationKind | None, in_flight: tuple[str, ...] = ()) -> ProcessAnswer:
    operations = () if kind is None else (Operation(kind, "interact", None, 12.0, 1),)
    return ProcessAnswer(Publication(operations, 1, running=True, quiet=15.0), in_flight, stacks=stacks)


class Job:
    """A job whose processes give these answers, look after look; None: none, and stacks are read from outside."""

    def __init__(self, answers: Mapping[str, ProcessAnswer | None], driver: ProcessAnswer | None = None) -> None:
        workers: dict[str, Any] = {
            name: WorkerRecord(WorkerAddress.from_name(name), 1, life=Life.READY) for name in answers
        }
        peers = {name: hello(10 + place) for place, name in enumerate(answers)}
        values = {name: one for name, one in answers.items() if one is not None}
        self.looks = [JobSnapshot("job", peers, workers, {}, {**values, **({"driver": driver} if driver else {})})]

    def snapshot(self, *, stacks: bool) -> JobSnapshot:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def read_stacks(self, helper: str, request: StackRequest) -> list[ProcessStacks]:
        return [ProcessStacks(11, 0, "ray::env", "py-spy", OWN, "")] if request.own else []

    def run_by(self, pid: int) -> None:
        """Have a process of this machine be that of `env:0`."""
        (job,) = self.looks
        shown = hello(pid)
        self.looks = [replace(job, peers={"env:0": replace(shown, process=identity_here(pid))})]


def lines(answers: Mapping[str, ProcessAnswer | None], driver: ProcessAnswer | None = None) -> list[str]:
    return [standing.how for standing in held_up(Job(answers, driver))]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other at once, but that a process may use a processor between them."""
    monkeypatch.setattr(job_view, "_PAUSE", 0.15)


@pytest.fixture
def running() -> Job:
    """A job of one worker that runs a method, and answers."""
    return Job({"env:0": answer(OWN, OperationKind.METHOD)})


@pytest.fixture
def sleeper(running: Job) -> Iterator[subprocess.Popen[bytes]]:
    """The process of that worker, which does nothing."""
    with subprocess.Popen(["sleep", "600"]) as process:
        until(lambda: stat(process.pid).state == "S", "sleep")
        running.run_by(process.pid)
        yield process
        process.kill()


def test_method_that_never_ends_is_named_with_its_frame() -> None:
    waiting = answer(OWN, OperationKind.RECV)
    assert lines({"env:0": answer(WAITS_IN_PYTHON, OperationKind.METHOD), "rollout:0": waiting}) == [
        "`env:0` (pid 10) runs `interact` for 12 s, at /home/me/env.py:12 in step"
    ]


def test_silent_process_is_read_from_outside() -> None:
    assert lines({"rollout:0": answer(OWN, OperationKind.RECV), "env:0": None}) == [
        "`env:0` (pid 11) does not answer: native code holds the interpreter's lock, at /home/me/env.py:12 in step"
    ]


def test_rank_outside_of_a_collective_is_named_first() -> None:
    ranks = {"actor:0": answer(REDUCES, OperationKind.METHOD), "actor:1": answer(OWN, OperationKind.METHOD)}
    assert lines(ranks) == [
        "`actor:1` (pid 11) runs `interact` for 12 s, at /home/me/env.py:12 in step;"
        " `actor:0` waits for it in a collective operation"
    ]


def names(standing: list[Standing]) -> list[str]:
    return [one.name for one in standing]


def test_process_that_uses_no_processor_holds_the_job_up(running: Job, sleeper: subprocess.Popen[bytes]) -> None:
    assert names(held_up(running)) == ["env:0"]
    assert held_up(running, certain_only=True) == []


def test_process_that_may_run_does_not_stand(running: Job) -> None:
    """On a busy machine it may have got no processor between two looks."""
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as process:
        running.run_by(process.pid)
        assert held_up(running) == []
        process.kill()


def test_stopped_process_is_named_at_the_first_look(running: Job, sleeper: subprocess.Popen[bytes]) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    until(lambda: stat(sleeper.pid).is_stopped)
    (standing,) = held_up(running, certain_only=True)
    words = f"is stopped, as by SIGSTOP; `kill -CONT {sleeper.pid}` continues it"
    assert standing == Standing("env:0", f"`env:0` (pid {sleeper.pid}) {words}")


def test_zombie_is_named_at_the_first_look(running: Job, sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    until(lambda: stat(sleeper.pid).state == "Z")
    (standing,) = held_up(running, certain_only=True)
    assert "is a zombie: its main thread has ended" in standing.how


def test_nobody_is_named_while_an_operation_ends(running: Job) -> None:
    (job,) = running.looks
    assert names(held_up(running)) == ["env:0"]
    later = answer(OWN, OperationKind.METHOD)
    moved = replace(later, publication=replace(later.publication, progress=2))
    running.looks = [job, replace(job, answers={"env:0": moved})]
    assert held_up(running) == []
    launching = WorkerRecord(WorkerAddress.from_name("new:0"), 1)
    running.looks = [replace(job, workers={**job.workers, "new:0": launching})]
    assert held_up(running) == []


@pytest.mark.parametrize("called", [True, False])
def test_lost_reply_is_that_of_an_idle_worker(called: bool) -> None:
    driver = answer("", OperationKind.CALL, ("env:0",) if called else ())
    words = "`env:0` (pid 10) does not run the method that is waited for, and has done nothing for 15 s:"
    said = lines({"env:0": answer(OWN, None)}, driver)
    assert said == ([f"{words} the thread that ran it ended, or its reply is lost"] if called else [])
