"""The thread for calls of a controller that block."""

from __future__ import annotations

import sys
import threading
from functools import partial

from recipes.embodied.robots.controller.fci_arm import WorkerThread
from tests.waiting import until


def test_it_is_idle_only_when_every_job_has_ended() -> None:
    worker, ended = WorkerThread("jobs", lambda _: None), list[int]()
    interval = sys.getswitchinterval()
    # Threads take turns at almost every instruction.
    sys.setswitchinterval(1e-6)
    try:
        for number in range(2000):
            worker.submit(partial(ended.append, number))
            while not worker.idle:
                pass
            assert len(ended) == number + 1
    finally:
        sys.setswitchinterval(interval)


def test_a_job_that_fails_is_reported_and_the_next_runs() -> None:
    errors, ran = list[str](), threading.Event()
    worker = WorkerThread("jobs", lambda error: errors.append(str(error)))
    worker.submit(lambda: [][0])
    worker.submit(ran.set)
    assert ran.wait(60)
    until(lambda: worker.idle, "the end of both jobs")
    assert errors == ["list index out of range"]
