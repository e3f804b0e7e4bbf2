"""A worker's process: its calls, its members and its timers."""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.work import Work
from rlinf_core.errors import InvalidNameError, PayloadError
from rlinf_core.runners.metrics import write_profile
from rlinf_core.waiting import OperationKind
from rlinf_core.worker import debugging
from rlinf_core.worker import timer as module
from rlinf_core.worker.communication import broadcast_members, source_address
from rlinf_core.worker.process import run_on_loop
from rlinf_core.worker.timer import CallRecord, Reduction, add_call, call_records, recording, reduce_durations, timer
from rlinf_core.worker.worker import Worker
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


def test_one_timer_of_nested_blocks(clock: Clock) -> None:
    step = timer("step")
    with recording() as durations, step:
        clock.now += 1
        with step:
            clock.now += 2
    assert durations == {"step": 3 + 2}


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


def test_objects_that_do_the_work_later_are_not_timed() -> None:
    def frames() -> Iterator[int]:
        yield 1

    async def steps() -> AsyncIterator[int]:
        yield 1

    async def load() -> None: ...

    for function in (frames, steps):
        with pytest.raises(TypeError, match=f"`.*{function.__name__}` is a generator: time the loop"):
            timer("work")(function)
    with pytest.raises(TypeError, match=r"`.*<lambda>` returned a coroutine: put the timer on the `async def`"):
        _ = timer("work")(lambda: load())()


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


@pytest.mark.parametrize("tag", [len, 3, b"train"])
def test_a_tag_is_text_and_a_decorator_is_called(tag: Any) -> None:
    with pytest.raises(TypeError, match=r'the tag of a timer is text, as in `@Worker.timer\("step"\)`, not'):
        timer(tag)


@pytest.mark.parametrize("rows", [-1, 2.0, "3", None, True])
def test_rows_are_a_number_of_them(rows: Any) -> None:
    with pytest.raises(ValueError, match=r"`rows` of a timer is .*, expected an integer >= 0"):
        timer("step", rows)


@pytest.fixture
def _none_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_calls", {})


@pytest.mark.usefixtures("_none_before")
def test_calls_are_kept_by_tag_and_rows() -> None:
    for rows in (8, 8, 16):
        with timer("step", rows):
            pass
    with timer("other"):
        pass
    assert [(call.tag, call.rows, call.calls) for call in call_records()] == [
        ("step", 8, 2),
        ("step", 16, 1),
        ("other", 0, 1),
    ]


@pytest.mark.usefixtures("_none_before")
def test_large_sizes_are_kept_together_by_two_digits() -> None:
    for rows in (1230, 1280, 1310, 99, 98):
        add_call("learn", rows, 1.0)
    assert {(call.rows, call.calls) for call in call_records()} == {(1255, 2), (1310, 1), (99, 1), (98, 1)}


@pytest.mark.usefixtures("_none_before")
def test_the_newest_durations_of_a_bounded_number_are_kept() -> None:
    for rows in range(1000):
        add_call(f"tag {rows}", 1, 1.0)
    assert len(call_records()) < 1000
    for seconds in range(200):
        add_call("tag 0", 1, float(seconds))
    (first, *_) = call_records()
    assert (first.calls, first.newest[-1], len(first.newest)) == (201, 199.0, 64)


@pytest.mark.usefixtures("_none_before")
def test_the_profile_keeps_sizes_of_calls_apart(tmp_path: Path) -> None:
    for rows in (1250, 1299, 1300, 1340, 99, 104, 106):
        add_call("learn", rows, 1.0)
    write_profile(tmp_path / "profile.json", {"actor": [call_records(), call_records()]})
    record: Any = json.loads((tmp_path / "profile.json").read_text())
    rows = {row["rows"]: row["calls"] for row in record["rows"] if row["component"] == "actor"}
    assert rows == {1274.5: 4, 1320: 4, 99: 2, 105: 4}


@pytest.mark.usefixtures("_none_before")
def test_the_profile_of_a_component_is_over_its_ranks(tmp_path: Path) -> None:
    add_call("answer", 20, 0.0)
    ranks = [[CallRecord("env/step", 8, 2, 0.4, (0.1, 0.3))], [CallRecord("env/step", 8, 1, 0.9, (0.9,))]]
    write_profile(tmp_path / "profile.json", {"env": ranks})
    record: Any = json.loads((tmp_path / "profile.json").read_text())
    env, answer = record["rows"]
    assert {**env, "quantiles": [env["quantiles"][at] for at in (0, 10, 20)]} == {
        "component": "env",
        "phase": "env/step",
        "processes": 2,
        "rows": 8,
        "calls": 3,
        "seconds": 1.3,
        "slowest": 0.9,
        "quantiles": [0.1, 0.3, 0.9],
    }
    assert (answer["component"], answer["rows"], answer["quantiles"]) == ("driver", 20, [])


@pytest.mark.parametrize("group", ["..", "../../x", "a/b", ".hidden", "/etc"])
def test_a_log_stays_in_its_folder_whatever_its_group_is_called(tmp_path: Path, group: str) -> None:
    context: Any = SimpleNamespace(address=WorkerAddress(group, 0), session=SimpleNamespace(log_names={}))
    debugging._open(tmp_path / "logs", context).close()
    assert [path.relative_to(tmp_path).parts[::2] for path in tmp_path.rglob("*.log")] == [("logs", "rank_0.log")]


def test_groups_are_named_whole_or_by_ranks() -> None:
    assert broadcast_members(["w", "env:0", ("x", [1, 2])]) == [("w", None), ("env:0", None), ("x", [1, 2])]
    assert broadcast_members(("a", "b")) == [("a", None), ("b", None)]
    assert broadcast_members([("x", range(2))]) == [("x", range(2))]
    assert broadcast_members([("x", 1), ("y", np.int64(1))]) == [("x", (1,)), ("y", (1,))]
    assert broadcast_members([]) == []


@pytest.mark.parametrize(
    ("groups", "help"),
    [
        ("worker", r"write `\['worker'\]`"),
        (WorkerAddress("w", 0), r"write `\['w:0'\]`"),
        ([("w", True)], r"write `\('w', \[True\]\)`"),
        ([("w", 1.5)], r"write `\('w', \[1.5\]\)`"),
        (("w", 1), r'write `\["rollout"\]`'),
        (("w", [0, 1]), r'\[\("rollout", \[0, 1\]\)\]'),
        ([WorkerAddress("w", 0)], r'\[\("rollout", \[0, 1\]\)\]'),
        ([("w", "01")], r"write `\('w', \['01'\]\)`"),
        ([("w", [0], 1)], "rollout"),
        ([0], "rollout"),
        (0, "rollout"),
        (None, "rollout"),
        (b"w", "rollout"),
    ],
    ids=repr,
)
def test_group_without_members_is_refused_with_the_right_form(groups: Any, help: str) -> None:
    with pytest.raises(InvalidNameError, match=help):
        broadcast_members(groups)


def test_a_source_is_a_pair_or_an_address() -> None:
    assert source_address(("w", 1)) == source_address(WorkerAddress("w", 1)) == WorkerAddress("w", 1)
    assert source_address(("env:0", 1)) == WorkerAddress("env", (0, 1))


def test_first_member_is_the_source_where_none_is_given() -> None:
    assert source_address(None, [("w", None), ("x", None)]) == WorkerAddress("w", 0)
    assert source_address(None, [("env:0", (2, 1))]) == WorkerAddress("env", (0, 2))
    with pytest.raises(InvalidNameError):
        source_address(None, [("w", [])])


class Slow(Work[None]):
    """A send that takes until it is waited for."""

    def wait_until(self, deadline: float, seconds: float | None = None, *, extended: bool = False) -> bool:
        return self.finish(None)


def test_sends_to_many_are_over_when_one_of_them_fails() -> None:
    class Sender(Worker):
        def send(self, obj: object, *_: Any, **__: Any) -> Any:
            if obj is None:
                raise PayloadError("it does not pickle")
            works.append(Slow(OperationKind.SEND, "w:0", 10))
            return works[-1]

    works: list[Slow] = []
    with pytest.raises(PayloadError, match="it does not pickle"):
        Sender().send_to({0: "one", 1: "two", 2: None}, "w")
    assert [work.settled for work in works] == [True, True]


@pytest.mark.parametrize("src", ["w:0", "wo", 0, None, ("w",), ("w", 0, 1), 1.5], ids=repr)
def test_what_is_no_source_is_refused_with_the_form_that_is(src: Any) -> None:
    with pytest.raises(InvalidNameError, match=r"is not a valid source .*\n.*\n  help: write `\(\"actor\", 0\)`"):
        source_address(src)


# Seconds after which a call hangs, however busy the machine is.
HANGS = 60


async def give_up(error: type[BaseException]) -> None:
    await asyncio.sleep(0)
    raise error(3)


async def leave_to_a_task(error: type[BaseException]) -> None:
    await asyncio.create_task(give_up(error))


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, ValueError])
@pytest.mark.parametrize("method", [give_up, leave_to_a_task])
def test_coroutine_errors_are_raised_at_the_caller(
    error: type[BaseException], method: Callable[[type[BaseException]], Coroutine[Any, Any, None]]
) -> None:
    caller = ThreadPoolExecutor(1)
    called = caller.submit(run_on_loop, method(error))
    try:
        assert isinstance(called.exception(HANGS), error)
    except TooLate:
        pytest.fail("the call hangs")
    finally:
        caller.shutdown(wait=False)


def test_the_loop_goes_on_for_others_when_one_wants_to_exit() -> None:
    other = ThreadPoolExecutor(1)
    started = asyncio.Event()

    async def wait_for_the_other() -> int:
        await started.wait()
        return await answer()

    async def start_and_exit() -> None:
        started.set()
        raise SystemExit(3)

    waiting = other.submit(run_on_loop, wait_for_the_other())
    with pytest.raises(SystemExit):
        run_on_loop(start_and_exit())
    assert waiting.result(HANGS) == 42
    other.shutdown()
