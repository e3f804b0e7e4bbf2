"""What the watch over a job takes for a wait, from the answers of its processes."""

from __future__ import annotations

from rlinf_core.manager.manager_messages import ProcessAnswer
from rlinf_core.manager.wait_graph import WaitGraph
from rlinf_core.manager.watch import processes_of
from rlinf_core.process.inflight_ops import InflightOps
from rlinf_core.waiting import OperationKind


def answer(peer: str, *recipients: str) -> ProcessAnswer:
    """That of a process which waits for a message of a peer, with messages of its own on their way."""
    board = InflightOps()
    board.begin(OperationKind.METHOD, "train")
    board.begin(OperationKind.RECV, peer)
    return ProcessAnswer(1, board.publication(), recipients=recipients)


def members(**answers: ProcessAnswer) -> list[tuple[str, ...]]:
    named = {name.replace("_", ":"): one for name, one in answers.items()}
    return [deadlock.members for deadlock in WaitGraph(processes_of(named, {})).deadlocks()]


def test_message_on_its_way_is_no_wait() -> None:
    assert members(a_0=answer("b:0"), b_0=answer("a:0")) == [("a:0", "b:0")]
    assert members(a_0=answer("b:0", "b:0"), b_0=answer("a:0")) == []


def test_message_to_others_excuses_nobody() -> None:
    third = answer("a:0", "d:0")
    assert members(a_0=answer("b:0"), b_0=answer("a:0"), c_0=third) == [("a:0", "b:0")]
