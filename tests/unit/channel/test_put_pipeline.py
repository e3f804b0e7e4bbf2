from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.channel.pending import PutPipeline, QueuedPut
from rlinf_core.collective.message import Encoded

KIB = 1 << 10


@dataclass
class Handle:
    op_id: int
    settled: bool = False


@dataclass
class Line:
    """A pipeline, what it sent, and what is on its way."""

    frames: list[list[int]] = field(default_factory=list[list[int]])
    ended: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        self.pipeline = PutPipeline(self._send, self._end)

    def _send(self, run: Sequence[QueuedPut]) -> None:
        self.frames.append([put.operation.op_id for put in run])

    def _end(self) -> None:
        self.ended += 1

    def put(self, size: int = 100, *, large: bool = False) -> Handle:
        self.count += 1
        handle = Handle(self.count)
        item: Any = Encoded(b"", []) if large else b""
        assert self.pipeline.add(QueuedPut(cast("Any", handle), item, 0, size))
        return handle

    @property
    def sent(self) -> list[int]:
        return [op_id for frame in self.frames for op_id in frame]


def test_first_message_goes_at_once_later_ones_together() -> None:
    line = Line()
    for _ in range(4):
        line.put()
    assert line.frames == [[1]]
    line.pipeline.ended([1])
    assert line.frames == [[1], [2, 3, 4]]
    line.pipeline.ended([2, 3])
    assert line.ended == 0
    line.pipeline.ended([4])
    assert line.ended == 1


def test_a_full_frame_does_not_wait_for_the_one_before() -> None:
    line = Line()
    for _ in range(257):
        line.put()
    assert [len(frame) for frame in line.frames] == [1, 256]


def test_what_exceeds_the_window_stays_here() -> None:
    line = Line()
    for _ in range(5000):
        line.put()
    assert len(line.sent) <= 1024 + 256
    while line.sent != list(range(1, 5001)):
        line.pipeline.ended(line.frames[-1])
    assert all(len(frame) <= 256 for frame in line.frames)


def test_large_ones_go_alone_and_a_few_at_a_time() -> None:
    line = Line()
    for _ in range(6):
        line.put(10 << 20, large=True)
    assert line.frames == [[1], [2]]
    line.put()
    line.pipeline.ended([1, 2])
    assert line.frames[2:] == [[3], [4]]
    line.pipeline.ended([3, 4])
    line.pipeline.ended([5, 6])
    assert line.sent == [1, 2, 3, 4, 5, 6, 7]


def test_what_was_given_up_before_it_was_sent_is_not_sent() -> None:
    line = Line()
    handles = [line.put() for _ in range(4)]
    handles[2].settled = True
    line.pipeline.ended([1])
    assert line.sent == [1, 2, 4]


def test_flushing_sends_all_whatever_the_window() -> None:
    line = Line()
    for _ in range(3000):
        line.put()
    line.pipeline.flush()
    assert line.sent == list(range(1, 3001))


def test_a_lane_that_ended_takes_nothing_more() -> None:
    line = Line()
    line.put()
    line.put()
    line.pipeline.drop()
    assert line.ended == 1
    assert not line.pipeline.add(QueuedPut(cast("Any", Handle(3)), b"", 0, 0))


@given(st.lists(st.sampled_from(["small", "large", "accept"]), max_size=300))
def test_the_order_is_that_of_the_calls_and_everything_leaves(steps: list[str]) -> None:
    line = Line()
    open_ones: list[int] = []
    seen = 0
    for step in [*steps, *["accept"] * len(steps)]:
        open_ones += line.sent[seen:]
        seen = len(line.sent)
        if step == "accept":
            if open_ones:
                line.pipeline.ended([open_ones.pop(0)])
        elif not line.pipeline.closed:
            line.put(20 << 20 if step == "large" else 100, large=step == "large")
    assert line.sent == list(range(1, line.count + 1))
