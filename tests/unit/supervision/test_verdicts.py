"""Who holds up a run, of what its processes say of themselves and what is read of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.node.stacks.process_stacks import ProcessStacks
from rlinf_core.supervision import verdicts
from rlinf_core.supervision.job_view import JobSnapshot, ReadStacks, job_processes
from rlinf_core.supervision.lives import Life, WorkerRecord
from rlinf_core.supervision.verdicts import spell_standing, suspected
from rlinf_core.supervision.waits import ProcessAnswer
from rlinf_core.waiting import Operation, OperationKind, Publication, PublishedOperation
from tests.unit.cli.debug.test_job_stacks import hello
from tests.waiting import until

CALLED = 'thread MainThread:\n  File "/rlinf_core/worker/calls.py", line 5, in call'
OWN = f'{CALLED}\n  File "/home/me/env.py", line 12, in step'
REDUCES = f'{OWN}\n  File "/site-packages/torch/distributed/c10d.py", line 9, in all_reduce'
WAITS_IN_PYTHON = f'{OWN}\n  File "/usr/lib/python3.11/threading.py", line 320, in wait'


def answer(stacks: str, kind: OperationKind | None, in_flight: tuple[str, ...] = ()) -> ProcessAnswer:
    operations = () if kind is None else (PublishedOperation(Operation(kind, "interact", None, 0.0, 1), 12.0),)
    return ProcessAnswer(Publication(operations, 1, running=True, quiet=15.0), in_flight, stacks=stacks)


def lines(answers: Mapping[str, ProcessAnswer | None], driver: ProcessAnswer | None = None) -> list[str]:
    """What is said of workers with these answers; None: no answer, and stacks are read from outside."""
    workers: dict[str, Any] = {
        name: WorkerRecord(WorkerAddress.from_name(name), 1, life=Life.READY) for name in answers
    }
    peers = {name: hello(10 + place) for place, name in enumerate(answers)}
    values = {name: one for name, one in answers.items() if one is not None}
    job = JobSnapshot("job", peers, workers, {}, {**values, **({"driver": driver} if driver else {})})

    def read(question: ReadStacks) -> list[ProcessStacks]:
        return [ProcessStacks(11, 0, "ray::env", "py-spy", OWN, "")] if question.own else []

    processes = job_processes(job, list(suspected(job)), native=False, remotely=read)
    return [standing.how for standing in spell_standing(job, processes)]


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


def test_process_that_may_run_does_not_stand() -> None:
    """On a busy machine it may have got no processor between two looks."""
    assert verdicts._seconds(os.getpid()) == float("inf")
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        until(lambda: verdicts._seconds(sleeper.pid) < float("inf"), "sleep")
        first = {"env:0": verdicts._seconds(sleeper.pid)}
        assert not verdicts._worked(first, {"env:0": verdicts._seconds(sleeper.pid)})
        assert verdicts._worked(first, {"env:0": float("inf")})
        assert verdicts._worked({"env:0": float("inf")}, first)
        sleeper.kill()


@pytest.mark.parametrize("called", [True, False])
def test_lost_reply_is_that_of_an_idle_worker(called: bool) -> None:
    driver = answer("", OperationKind.CALL, ("env:0",) if called else ())
    words = "`env:0` (pid 10) does not run the method that is waited for, and has done nothing for 15 s:"
    said = lines({"env:0": answer(OWN, None)}, driver)
    assert said == ([f"{words} the thread that ran it ended, or its reply is lost"] if called else [])
