from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from rlinf_core.worker import timer as module
from rlinf_core.worker.timer import Reduction, recording, reduce_durations, timer
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_block_is_timed_and_uses_add_up(clock: Clock) -> None:
    with recording() as durations:
        for seconds in (1, 2):
            with timer("step"):
                clock.now += seconds
            clock.now += 100
    assert durations == {"step": 3}


def test_nested_tags_each_have_their_whole_time(clock: Clock) -> None:
    class Trainer:
        @timer("train")
        def train(self, batch: int) -> int:
            """Train."""
            clock.now += 1
            return self.step(batch) + 1

        @timer("step")
        def step(self, batch: int) -> int:
            clock.now += 2
            return batch * 10

    with recording() as durations:
        assert Trainer().train(4) == 41
    assert durations == {"step": 2, "train": 3}
    assert Trainer.train.__doc__ == "Train."


def test_recursion_through_one_decorated_function(clock: Clock) -> None:
    @timer("down")
    def down(depth: int) -> None:
        clock.now += 1
        if depth:
            down(depth - 1)

    with recording() as durations:
        down(2)
    assert durations == {"down": 3 + 2 + 1}


def test_coroutine_functions_are_timed_while_they_run(clock: Clock) -> None:
    @timer("load")
    async def load(value: int) -> int:
        await asyncio.sleep(0)
        clock.now += 2
        return value

    async def call() -> dict[str, float]:
        with recording() as durations:
            assert await load(7) == 7
        return durations

    assert asyncio.iscoroutinefunction(load)
    assert asyncio.run(call()) == {"load": 2}


def test_calls_that_overlap_do_not_mix(clock: Clock) -> None:
    async def call(tag: str, seconds: float, mine: asyncio.Event, others: asyncio.Event) -> dict[str, float]:
        with recording() as durations:
            mine.set()
            await others.wait()
            with timer(tag):
                clock.now += seconds
        return durations

    async def both() -> list[dict[str, float]]:
        one, two = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(call("a", 1, one, two), call("b", 2, two, one))

    assert asyncio.run(both()) == [{"a": 1}, {"b": 2}]


def test_tasks_and_copied_contexts_belong_to_their_call(clock: Clock) -> None:
    def work() -> None:
        with timer("thread"):
            clock.now += 1

    async def child() -> None:
        with timer("task"):
            clock.now += 4

    async def call() -> dict[str, float]:
        with recording() as durations:
            await asyncio.gather(child(), child())
            context = contextvars.copy_context()
            thread = threading.Thread(target=lambda: context.run(work))
            thread.start()
            thread.join()
        return durations

    assert asyncio.run(call()) == {"task": 8, "thread": 1}


def test_what_raises_has_taken_time(clock: Clock) -> None:
    @timer("fails")
    def fails() -> None:
        clock.now += 5
        raise KeyError

    with recording() as durations, pytest.raises(KeyError):
        fails()
    assert durations == {"fails": 5}


def test_outside_of_a_call_nothing_is_kept(clock: Clock) -> None:
    with timer("lost"):
        clock.now += 1
    with recording() as outer:
        with recording() as inner, timer("inner"):
            clock.now += 1
        with timer("outer"):
            clock.now += 2
    with timer("lost"):
        clock.now += 1
    assert (outer, inner) == ({"outer": 2}, {"inner": 1})


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("max", {"a": 3, "b": 10, "c": 1}),
        ("min", {"a": 1, "b": 10, "c": 1}),
        ("mean", {"a": 2, "b": 10, "c": 1}),
        ("sum", {"a": 4, "b": 10, "c": 1}),
    ],
)
def test_ranks_are_reduced_by_tag(reduction: Reduction, expected: dict[str, float]) -> None:
    by_rank = [{"a": 1.0, "b": 10.0}, {"a": 3.0, "c": 1.0}, {}]
    assert reduce_durations(by_rank, reduction) == expected
    assert list(reduce_durations(by_rank, reduction)) == ["a", "b", "c"]


def test_no_ranks_have_no_durations() -> None:
    assert reduce_durations([]) == {}


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="`median` is not a reduction of durations, expected one of `max`, `min`"):
        reduce_durations([{"a": 1.0}], "median")  # pyright: ignore[reportArgumentType]


def test_a_timer_without_a_tag_has_the_name_of_its_function(clock: Clock) -> None:
    class Trainer:
        @timer()
        def train(self) -> None:
            clock.now += 1

    def block() -> None:
        with timer():
            clock.now += 2

    with recording() as durations:
        Trainer().train()
        block()
    assert durations == {"train": 1, "block": 2}
