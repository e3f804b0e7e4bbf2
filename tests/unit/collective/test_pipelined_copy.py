"""How much of a body is there whose sender still writes it."""

from __future__ import annotations

import threading

import pytest

from rlinf_core.collective.messages.pipelined_copy import Growth
from rlinf_core.collective.work import WaitTable, Work
from rlinf_core.errors import CommunicationTimeoutError, WorkerDiedError
from rlinf_core.waiting import OperationKind

_RECV = (OperationKind.RECV_TENSOR, "actor:0")


class Idle:
    """A connection that nobody reads."""

    def poll(self, work: Work[object], deadline: float) -> None: ...

    def wake(self) -> None: ...


def new_growth(seconds: float = 5.0) -> Growth:
    return Growth(100, "actor:0", Idle(), WaitTable(), seconds)


def test_who_waits_is_told_of_each_piece() -> None:
    growth = new_growth()
    seen: list[int] = []

    def follow() -> None:
        while not seen or seen[-1] < 100:
            seen.append(growth.wait_beyond(seen[-1] if seen else 0))

    thread = threading.Thread(target=follow)
    thread.start()
    for filled in (10, 60, 100):
        growth.grown(filled)
    thread.join(5)
    assert not thread.is_alive()
    assert seen[-1] == 100
    assert seen == sorted(set(seen))


def test_what_is_there_is_given_before_the_failure_of_the_rest() -> None:
    growth = new_growth()
    growth.grown(60)
    growth.fail(WorkerDiedError("actor:0"))
    assert growth.wait_beyond(0) == 60
    with pytest.raises(WorkerDiedError):
        growth.wait_beyond(60)


def test_a_failure_wakes_who_waits() -> None:
    growth = new_growth()
    timer = threading.Timer(0.05, growth.fail, [WorkerDiedError("actor:0")])
    timer.start()
    with pytest.raises(WorkerDiedError):
        growth.wait_beyond(0)
    timer.join()


def test_waiting_ends_with_the_time_of_the_receive() -> None:
    growth = new_growth(1800)
    work: Work[object] = Work(*_RECV, 0.05)
    growth.expect(work.seconds, work.since)
    with pytest.raises(CommunicationTimeoutError, match="recv_tensor from actor:0"):
        growth.wait_beyond(0)


@pytest.mark.parametrize("ended", [True, False])
def test_callbacks_come_once_at_the_end(ended: bool) -> None:
    growth = new_growth()
    output: list[str] = []
    growth.when_ended(lambda: output.append("early"))
    growth.grown(99)
    assert output == []
    if ended:
        growth.grown(100)
    else:
        growth.fail(WorkerDiedError("actor:0"))
    growth.when_ended(lambda: output.append("late"))
    assert output == ["early", "late"]
