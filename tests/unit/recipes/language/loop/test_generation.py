"""The stream of prompts and reports, between threads of this process."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from recipes.language.answers.prompt_messages import (
    ANSWERS,
    REPORTS,
    Inbox,
    NewWeights,
    Prompt,
    ScoredGroup,
    orders_key,
)
from recipes.language.loop.generation import AsyncRollouts, wait_for
from rlinf_core.channel.channel import Channel
from rlinf_core.errors import RunError
from tests.unit.recipes.language.loop.test_prompt_plan import answered


class Call:
    """A method that runs in threads, with the parts of a handle that matter here."""

    def __init__(self, *targets: Any) -> None:
        self.error: BaseException | None = None
        self.threads = [threading.Thread(target=self.run, args=(target,), daemon=True) for target in targets]
        for thread in self.threads:
            thread.start()

    def run(self, target: Any) -> None:
        try:
            target()
        except BaseException as error:
            self.error = error

    @property
    def failed(self) -> bool:
        return self.error is not None

    def done(self) -> bool:
        return self.failed or not any(thread.is_alive() for thread in self.threads)

    def wait(self) -> list[None]:
        while not self.done():
            self.threads[0].join(0.01)
        if self.error is not None:
            raise self.error
        return [None for _ in self.threads]


class Workers:
    """Two rollout workers, which hand prompts on, and two reward workers, which report them."""

    def __init__(self) -> None:
        self.answers = Channel.create("answers", local=True)
        self.scored = Channel.create("scored", local=True)
        self.orders: list[tuple[int, Any]] = []
        self.begun: list[Call] = []

    def generate_forever(self) -> Any:
        return self._begin(lambda: self._answer(0), lambda: self._answer(1))

    def score_forever(self) -> Any:
        return self._begin(self._score, self._score)

    def _begin(self, *targets: Any) -> Call:
        self.begun.append(Call(*targets))
        return self.begun[-1]

    def _answer(self, rank: int) -> None:
        inbox = Inbox(self.answers, orders_key(rank))
        while (order := inbox.wait()) is not None:
            self.orders.append((rank, order))
            for prompt in () if isinstance(order, NewWeights) else order:
                if prompt.position == 99:
                    raise ValueError("this one is bad")
                self.answers.put(prompt, key=ANSWERS)

    def _score(self) -> None:
        inbox = Inbox(self.answers, ANSWERS)
        while (prompt := inbox.wait()) is not None:
            self.scored.put(ScoredGroup(answered(prompt, (1, 1))), key=REPORTS)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "recipes.language.loop.generation.wait_together",
        lambda *handles: [handle.wait() for handle in sorted(handles, key=lambda item: not item.failed)],
    )


def stream_of(workers: Workers) -> AsyncRollouts:
    sizes = {"rollout": 2, "reward": 2}
    return AsyncRollouts.of_engines(cast("Any", workers), cast("Any", workers), sizes, workers.answers, workers.scored)


def prompts(*workers: int, first: int = 0) -> list[Prompt]:
    return [Prompt(first + index, first + index, 1, worker, 2, 1.0) for index, worker in enumerate(workers)]


@pytest.mark.usefixtures("together")
def test_every_prompt_returns_once_and_the_end_releases_all() -> None:
    workers = Workers()
    stream = stream_of(workers)
    stream.load_weights(3)
    stream.ask(prompts(0, 0, 0, 1, 0))
    results: list[ScoredGroup] = []
    while len(results) < 5:
        results += stream.wait()
    assert sorted(result.report.slot for result in results) == [0, 1, 2, 3, 4]
    assert stream.tokens_per_second() > 0
    assert stream.tokens_per_second() == 0
    stream.ask([])
    stream.end()
    assert all(call.done() and not call.failed for call in workers.begun)
    assert [order for rank, order in workers.orders if rank == 1] == [NewWeights(3), tuple(prompts(0, 0, 0, 1))[3:]]


@pytest.mark.usefixtures("together")
def test_the_failure_of_a_worker_ends_the_wait_for_reports() -> None:
    stream = stream_of(Workers())
    stream.ask([Prompt(0, 99, 1, 1, 2, 1.0)])
    with pytest.raises(ValueError, match="this one is bad"):
        stream.wait()


class FailsBetweenLooks(Call):
    """A call whose failure arrives just after somebody has looked for it."""

    looks = 0

    @property
    def failed(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def done(self) -> bool:
        return self.looks > 0

    def wait(self) -> list[None]:
        raise ConnectionError("the machine is gone")


@pytest.mark.usefixtures("together")
def test_failure_between_two_looks_is_no_early_return(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers()
    call = FailsBetweenLooks()
    monkeypatch.setattr(workers, "score_forever", lambda: call)
    stream = stream_of(workers)
    with pytest.raises(ConnectionError, match="the machine is gone"):
        stream.wait()


@pytest.mark.usefixtures("together")
def test_workers_that_return_too_early_end_the_run() -> None:
    workers = Workers()
    stream = stream_of(workers)
    for rank in range(2):
        workers.answers.put(None, key=orders_key(rank))
    with pytest.raises(RunError, match="before the end"):
        stream.wait()


def test_something_else_is_done_until_a_call_returns() -> None:
    go_on, seen = threading.Event(), list[int]()

    def meanwhile() -> None:
        seen.append(len(seen))
        if len(seen) == 3:
            go_on.set()

    both = [Call(go_on.wait), Call(lambda: None)]
    assert wait_for(cast("Any", both), meanwhile) == [[None], [None]]
    assert len(seen) >= 3


def test_the_first_call_that_fails_ends_the_wait_for_all() -> None:
    never = threading.Event()

    def fail() -> None:
        raise ValueError("this one is bad")

    with pytest.raises(ValueError, match="this one is bad"):
        wait_for(cast("Any", [Call(never.wait), Call(fail)]), lambda: None)
    never.set()


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The gets whose handles were dropped unread, which people are told of."""
    result: list[object] = []
    # Those that other tests have left are told before.
    gc.collect()
    monkeypatch.setattr("rlinf_core.channel.handle.REAPER", SimpleNamespace(dropped=SimpleNamespace(put=result.append)))
    return result


def test_items_come_in_order_and_a_poll_does_not_wait() -> None:
    channel = Channel.create("c", local=True)
    inbox = Inbox(channel, "k")
    assert inbox.poll() == []
    for number in range(3):
        channel.put(number, key="k")
    assert inbox.wait() == 0
    assert inbox.poll() == [1, 2]


@pytest.mark.parametrize("abandoned", [False, True])
def test_the_item_of_a_run_that_failed_is_given_up_in_silence(dropped: list[object], abandoned: bool) -> None:
    inbox = Inbox(Channel.create("c", local=True), "k")
    assert inbox.poll() == []
    if abandoned:
        inbox.abandon()
    del inbox
    gc.collect()
    assert len(dropped) == (0 if abandoned else 1)
