"""Breakpoints, at which the clocks of others stand still, and stacks that another process reads."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from rlinf_core.errors import CommunicationTimeoutError, RuntimeFailure
from rlinf_core.supervision.job_view import ReadStacks
from rlinf_core.supervision.waits import Pauses
from rlinf_core.waiting import OperationKind
from tests.unit.supervision.rig import Job
from tests.waiting import until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pauses_of_several_processes_count_once() -> None:
    clock = Clock()
    pauses = Pauses(clock)
    pauses.begin("a:0")
    clock.now = 103.0
    pauses.begin("b:0")
    pauses.end("a:0")
    clock.now = 105.0
    assert pauses.within(100.0) == 5.0
    assert pauses.within(2.0) == 2.0
    pauses.end("b:0")
    pauses.end("c:0")
    clock.now = 110.0
    assert pauses.within(7.0) == 2.0
    pauses.begin("a:0")
    clock.now = 111.0
    assert pauses.within(100.0) == 6.0


def test_wait_does_not_expire_while_a_breakpoint_is_waited_at(job: Job) -> None:
    client = job.worker(job.join("driver"), "actor:0")
    client.stops_at("x.py:3")
    until(lambda: client.wait_reports.paused("env:0", 1.0) > 0)
    work = client.endpoint.work(OperationKind.RECV, "env:0", 1.0)
    outcome: list[object] = []
    waiting = threading.Thread(target=lambda: outcome.append(work.wait()), daemon=True)
    waiting.start()
    until(lambda: time.monotonic() > work.deadline + 0.3)
    assert waiting.is_alive()
    work.finish(None)
    waiting.join(20)
    assert outcome == [None]


def test_wait_expires_after_the_breakpoint_is_left(job: Job) -> None:
    client = job.worker(job.join("driver"), "actor:0")
    client.stops_at("x.py:3")
    until(lambda: client.wait_reports.paused("env:0", 1.0) > 0)
    work = client.endpoint.work(OperationKind.RECV, "env:0", 1.0)
    client.stops_at(None)
    with pytest.raises(CommunicationTimeoutError):
        work.wait()


def test_short_waits_are_not_extended(job: Job) -> None:
    client = job.worker(job.join("driver"), "actor:0")
    client.stops_at("x.py:3")
    until(lambda: client.wait_reports.paused("env:0", 1.0) > 0)
    assert client.wait_reports.paused("env:0", 0.5) == 0.0
    assert client.wait_reports.paused("manager", 5.0) == 0.0


def test_end_of_a_process_ends_its_pause(job: Job) -> None:
    driver = job.join("driver")
    client, other = job.worker(driver, "actor:0"), job.worker(driver, "env:0")
    client.stops_at("x.py:3")
    until(lambda: other.wait_reports.paused("actor:0", 1.0) > 0)
    client.close(linger=0.0)
    # It grows no more.
    until(lambda: other.wait_reports.paused("actor:0", 1000.0) == other.wait_reports.paused("actor:0", 1000.0))
    assert other.wait_reports.paused("actor:0", 1000.0) > 0


def test_helper_reads_a_known_process_alone(job: Job) -> None:
    job.worker(job.join("driver"), "actor:0")
    asking = job.join("inspect-1")
    stacks = asking.read_stacks(ReadStacks("actor:0", "actor:0", own=True, native=False), 20)
    assert next(iter(stacks)).pid == os.getpid()
    with pytest.raises(RuntimeFailure, match="`env:0`"):
        asking.read_stacks(ReadStacks("env:0", "actor:0", own=True, native=False), 20)


def test_driver_is_told_the_command(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    worker = job.worker(job.join("driver"), "actor:0")
    worker.stops_at("x.py:3")
    until(lambda: "actor:0 waits at a breakpoint, x.py:3; `rlinf ps --attach --job job actor:0`" in caplog.text)
    worker.stops_at("x.py:4", attached=True)
    worker.stops_at("x.py:5")
    until(lambda: "x.py:5" in caplog.text)
    assert "x.py:4" not in caplog.text


def test_command_names_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(log_folder=str(tmp_path / "runs" / "first" / "logs"))
    job.worker(job.join("driver"), "env:0").stops_at("x.py:3")
    until(lambda: "env:0 waits at a breakpoint" in caplog.text)
    job.close()
    assert "env:0 waits at a breakpoint, x.py:3; `rlinf ps --attach runs/first env:0` attaches to it" in caplog.text
