"""Spans: nothing without a recorder, bounded with one, and everything that a process does in it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from rlinf_core.collective.work import WaitTable, Work
from rlinf_core.process import tracing
from rlinf_core.process.tracing import SpanRecorder
from rlinf_core.waiting import OperationKind
from rlinf_core.worker.timer import timer


@pytest.fixture
def traced() -> Iterator[None]:
    tracing.start()
    yield
    tracing.stop()


def test_nothing_is_recorded_unless_traced() -> None:
    tracing.stop()
    with timer("work"):
        pass
    assert tracing.take() == ([], 0)


@pytest.mark.usefixtures("traced")
def test_a_timer_is_a_span() -> None:
    before = time.time()
    with timer("outer"), timer("inner"):
        pass
    taken = tracing.take()
    inner, outer = taken.spans
    assert [(span.kind, span.name) for span in taken.spans] == [("timer", "inner"), ("timer", "outer")]
    assert inner.task_key == outer.task_key == threading.get_ident()
    # One lies within the other, whatever comes between the two ends; the rest is rounding of seconds since 1970.
    assert outer.began <= inner.began + 1e-6
    assert inner.began + inner.seconds <= outer.began + outer.seconds + 1e-6
    # The clock of the host may be set meanwhile, hence the second.
    assert before - 1 <= outer.began <= time.time() + 1
    assert tracing.take() == ([], 0)


@pytest.mark.usefixtures("traced")
def test_waits_and_transfers_are_spans() -> None:
    board = WaitTable()
    work: Work[int] = Work(OperationKind.RECV, "actor:0", 30.0, board)
    sender: Work[int] = Work(OperationKind.SEND, "actor:0", 30.0, board, detached=True)
    threading.Timer(0.01, lambda: (work.finish(1), sender.finish(2))).start()
    serial = board.operations.begin(OperationKind.METHOD, "generate")
    assert (work.wait(), sender.wait()) == (1, 2)
    board.operations.end(serial)
    results = {(span.kind, span.name) for span in tracing.take().spans}
    assert {
        ("wait", "recv from actor:0"),
        ("transfer", "recv from actor:0"),
        ("transfer", "send to actor:0"),
        ("method", "generate"),
    } <= results


@pytest.mark.usefixtures("traced")
def test_a_wait_for_what_goes_on_in_the_background_is_a_span() -> None:
    work: Work[int] = Work(OperationKind.SEND, "actor:0", 30.0, WaitTable(), detached=True)
    threading.Timer(0.05, lambda: work.finish(1)).start()
    work.wait()
    waits = [span for span in tracing.take().spans if span.kind == tracing.WAIT]
    assert [span.name for span in waits] == ["send to actor:0"]
    assert waits[0].task_key == threading.get_ident()


@pytest.mark.usefixtures("traced")
def test_tasks_of_one_thread_are_told_apart() -> None:
    async def timed(name: str) -> None:
        with timer(name):
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(timed("a"), timed("b"))

    asyncio.run(both())
    task_keys = {span.name: span.task_key for span in tracing.take().spans}
    assert task_keys["a"] != task_keys["b"]


def test_memory_is_bounded() -> None:
    recorder = SpanRecorder(limit=3)
    for number in range(5):
        recorder.add(tracing.TIMER, str(number), 0.0, 1.0)
    taken = recorder.take()
    assert [span.name for span in taken.spans] == ["0", "1", "2"]
    assert taken.dropped == 2
    recorder.add(tracing.TIMER, "later", 0.0, 1.0)
    assert recorder.take().dropped == 0
