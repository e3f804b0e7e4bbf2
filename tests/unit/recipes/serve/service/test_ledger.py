"""Promises, and the order of a model's requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from recipes.language.listening.request_error import RequestError
from recipes.serve.service import ledger as module
from recipes.serve.service.journal import Journal
from recipes.serve.service.ledger import (
    Call,
    Ledger,
    Promise,
    RequestFailure,
    RequestOrder,
    RequestRecord,
    RequestResult,
)

RECORD = RequestRecord("optim_step")


def call() -> Call:
    return Call(Promise("id", "ann", "s", {}), lambda: None)


def test_requests_come_in_their_order() -> None:
    order, calls = RequestOrder(), [call() for _ in range(4)]
    for seq in (3, 1, 4):
        order.put(seq, calls[seq - 1])
    assert list(order.ready) == [calls[0]]
    order.put(2, calls[1])
    assert list(order.ready) == calls
    assert order.next == 5


def test_order_refuses_a_number_too_far_ahead() -> None:
    with pytest.raises(RequestError, match="too far ahead"):
        RequestOrder().check(10_002)


def test_first_outcome_stays(tmp_path: Path) -> None:
    async def work() -> None:
        promise = Ledger("b", Journal(tmp_path)).promise("ann", "s", "key", b"", RECORD)
        promise.settle(RequestResult({"x": 1}))
        promise.settle(RequestFailure("late"))
        assert await promise.wait(0.1) == RequestResult({"x": 1})

    asyncio.run(work())


def test_same_name_of_another_request_is_refused(tmp_path: Path) -> None:
    ledger = Ledger("b", Journal(tmp_path))
    promise = ledger.promise("ann", "s", ("k", 1), b"one", RECORD)
    assert ledger.earlier("ann", ("k", 1), b"one") is promise
    assert ledger.earlier("ben", ("k", 1), b"one") is None
    with pytest.raises(RequestError, match="another request"):
        ledger.earlier("ann", ("k", 1), b"two")


def test_old_results_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 2)
    monkeypatch.setattr(module, "_UNFETCHED_SECONDS", 0.0)
    ledger = Ledger("b", Journal(tmp_path))
    promises = [ledger.promise("ann", "s", number, b"", RECORD) for number in range(3)]
    for promise in promises:
        promise.settle(RequestResult({}))
    with pytest.raises(RequestError, match="no result") as refused:
        ledger.find("ann", promises[0].request_id)
    assert refused.value.status == 410
    assert ledger.find("ann", promises[2].request_id) is promises[2]


def test_open_results_are_never_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 1)
    monkeypatch.setattr(module, "_UNFETCHED_SECONDS", 0.0)
    ledger = Ledger("b", Journal(tmp_path))
    promises = [ledger.promise("ann", "s", number, b"", RECORD) for number in range(5)]
    promises[4].settle(RequestResult({}))
    assert [ledger.find("ann", promise.request_id) for promise in promises] == promises


def test_fetched_results_make_room_before_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_BYTES", 10)
    monkeypatch.setattr(module, "_FETCHED_SECONDS", 0.0)

    async def work() -> None:
        ledger = Ledger("b", Journal(tmp_path))
        first, other = ledger.promise("ann", "s", 1, b"", RECORD), ledger.promise("ann", "s", 2, b"", RECORD)
        first.settle(RequestResult(b"x" * 20))
        assert ledger.find("ann", first.request_id) is first
        await first.wait(1)
        other.settle(RequestResult(b"x" * 20))
        assert ledger.find("ann", other.request_id) is other
        with pytest.raises(RequestError, match="no result"):
            ledger.find("ann", first.request_id)

    asyncio.run(work())
