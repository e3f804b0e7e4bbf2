"""Promises, the file that outlives the server, and the order of a model's requests."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest

from recipes.language.listening.request_error import RequestError
from recipes.serve.service import ledger as module
from recipes.serve.service.ledger import (
    Ledger,
    Outcome,
    Promise,
    RequestFailure,
    RequestKey,
    RequestResult,
)
from recipes.serve.service.state_file import REQUESTS, StateFile
from recipes.serve.service.tenants import Call, RequestOrder
from rlinf_core.errors import RunError

SESSION = "ab-12"
MODEL = f"{SESSION}:train:0"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A ledger with one session."""
    made = Ledger(StateFile(tmp_path), "b")
    made.file.begin_session(SESSION, "ann")
    return made


def ask(ledger: Ledger, number: int, body: bytes = b"", session: str = SESSION) -> Promise:
    """Return the promise of a request to a model."""
    key = RequestKey("request", f"{session}:train:0", number)
    return ledger.promise("ann", session, key, b"", "optim_step", {"number": number}, body)


def reopened(ledger: Ledger, folder: Path) -> Ledger:
    """Return the ledger of a later start."""
    ledger.file.close()
    return Ledger(StateFile(folder), "c")


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


async def test_first_outcome_stays(ledger: Ledger) -> None:
    promise = ask(ledger, 1)
    promise.settle(RequestResult({"x": 1}))
    promise.settle(RequestFailure("late"))
    for one in (promise, ledger.find("ann", promise.request_id)):
        assert await one.wait(0.1) == RequestResult({"x": 1})


@pytest.mark.parametrize(
    "outcome", [RequestResult({"x": 1.5}), RequestResult(b"\0\xff"), RequestFailure("no", "server")]
)
def test_later_start_finds_requests_and_outcomes(ledger: Ledger, tmp_path: Path, outcome: Outcome) -> None:
    done, waiting = ask(ledger, 1, b"body"), ask(ledger, 2)
    done.settle(outcome)
    ledger.file.keep_sampler("s", SESSION, None, "snapshot-1")
    ledger.file.keep_point("m", SESSION, 7, "model-0-7")
    later = reopened(ledger, tmp_path)
    assert later.file.sessions() == [(SESSION, "ann")]
    assert later.file.samplers(SESSION) == [("s", None, "snapshot-1")]
    assert later.file.points(SESSION) == {"m": (7, "model-0-7")}
    first, second = later.requests(SESSION)
    assert (first.key, first.route, first.fields, first.body) == (
        RequestKey("request", MODEL, 1),
        "optim_step",
        {"number": 1},
        b"body",
    )
    assert (first.promise.request_id, first.promise.outcome) == (done.request_id, outcome)
    assert (second.promise.request_id, second.promise.outcome) == (waiting.request_id, None)
    assert later.pending("ann") == (1, len('{"number": 2}'))


def test_same_name_of_another_request_is_refused(ledger: Ledger) -> None:
    key = RequestKey("sample", "s", 1)
    promise = ledger.promise("ann", SESSION, key, b"one", "asample", {})
    assert ledger.earlier(key, b"one") is promise
    assert ledger.earlier(RequestKey("sample", "t", 1), b"one") is None
    with pytest.raises(RequestError, match="another one"):
        ledger.earlier(key, b"two")


@pytest.mark.parametrize("name", ["nothing", "\ud800", "b-0\0"])
def test_ids_that_do_not_exist_are_gone(ledger: Ledger, name: str) -> None:
    with pytest.raises(RequestError, match="no result") as refused:
        ledger.find("ann", name)
    assert refused.value.status == 410


def test_results_of_others_do_not_exist(ledger: Ledger) -> None:
    promise = ask(ledger, 1)
    for _ in range(2):
        with pytest.raises(RequestError, match="no result"):
            ledger.find("ben", promise.request_id)
        promise.settle(RequestResult({}))


def kept(ledger: Ledger, promises: list[Promise]) -> list[bool]:
    """Return which results can still be had."""
    there: list[bool] = []
    for promise in promises:
        there.append(False)
        with suppress(RequestError):
            ledger.find("ann", promise.request_id)
            there[-1] = True
    return there


def test_old_results_make_room(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 2)
    monkeypatch.setattr(module, "_UNFETCHED_SECONDS", 0.0)
    promises = [ask(ledger, number) for number in range(1, 4)]
    for promise in promises:
        promise.settle(RequestResult({}))
    assert kept(ledger, promises) == [False, True, True]
    # It is done again by a later start all the same, and nobody is answered twice.
    with pytest.raises(RequestError, match="its result was dropped"):
        ledger.earlier(RequestKey("request", MODEL, 1), b"")
    later = reopened(ledger, tmp_path)
    assert [request.promise.outcome is None for request in later.requests(SESSION)] == [False] * 3
    late = ask(later, 4)
    late.settle(RequestResult({}))
    assert kept(later, [*promises, late]) == [False, False, True, True]


@pytest.mark.timeout(30)
def test_results_no_longer_in_the_file_are_not_dropped_for_ever(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEPT", 1)
    for number in range(4):
        key = RequestKey("request", "bob", number)
        ledger.promise("bob", SESSION, key, b"", "optim_step", {}).settle(RequestResult({}))
    with ledger.file.writing() as database:
        database.execute("DELETE FROM requests WHERE tenant = 'bob'")
    promise = ask(ledger, 1)
    promise.settle(RequestResult({}))
    assert kept(ledger, [promise]) == [True]


def test_open_results_are_never_dropped(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 1)
    monkeypatch.setattr(module, "_UNFETCHED_SECONDS", 0.0)
    promises = [ask(ledger, number) for number in range(5)]
    promises[4].settle(RequestResult({}))
    assert kept(ledger, promises) == [True] * 5


async def test_fetched_results_make_room_before_others(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_BYTES", 50)
    monkeypatch.setattr(module, "_FETCHED_SECONDS", 0.0)

    first, second, third = promises = [ask(ledger, number) for number in range(3)]
    for promise in (first, second):
        promise.settle(RequestResult(b"x" * 20))
    await second.wait(1)
    assert kept(ledger, promises) == [True, True, True]
    third.settle(RequestResult(b"x" * 20))
    assert kept(ledger, promises) == [True, False, True]


def test_what_a_point_holds_is_not_done_again(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    promises = [ask(ledger, number, b"body") for number in (1, 2, 3)]
    assert ledger.file.body_bytes(MODEL) == 12
    with monkeypatch.context() as dropping:
        dropping.setattr(module, "_KEPT", 0)
        dropping.setattr(module, "_UNFETCHED_SECONDS", 0.0)
        promises[0].settle(RequestResult({}))
    promises[1].settle(RequestResult({}))
    promises[2].settle(RequestResult({}))
    ledger.file.keep_point(MODEL, SESSION, 2, "model-0-2")
    assert ledger.file.body_bytes(MODEL) == 4
    later = reopened(ledger, tmp_path)
    assert [(request.key.number, request.body) for request in later.requests(SESSION)] == [(2, b""), (3, b"body")]


def test_ended_session_leaves_its_results_only(ledger: Ledger, tmp_path: Path) -> None:
    ledger.file.begin_session("cd-34", "ann")
    done, waiting, other = ask(ledger, 1, b"body"), ask(ledger, 2), ask(ledger, 1, session="cd-34")
    done.settle(RequestResult({}))
    ledger.file.keep_sampler("s", SESSION, None, "snapshot-1")
    ledger.file.keep_point(MODEL, SESSION, 1, "model-0-1")
    ledger.end_session(SESSION, "closed")
    ledger.file.end_session(SESSION)
    assert ledger.find("ann", done.request_id).outcome == RequestResult({})
    assert ledger.find("ann", waiting.request_id).outcome == RequestFailure("closed")
    assert other.outcome is None
    assert (ledger.file.samplers(SESSION), ledger.file.points(SESSION), ledger.file.body_bytes(MODEL)) == ([], {}, 0)
    assert [path.name for path in (tmp_path / "sessions").iterdir()] == ["cd-34"]
    # Folders of sessions that are not written down were left by a death in between.
    (tmp_path / "sessions/ef-56").mkdir()
    later = reopened(ledger, tmp_path)
    assert later.file.sessions() == [("cd-34", "ann")]
    assert [path.name for path in (tmp_path / "sessions").iterdir()] == ["cd-34"]
    assert kept(later, [done, waiting]) == [False, False]


def test_outcome_that_cannot_be_written_is_none(ledger: Ledger, tmp_path: Path) -> None:
    promise = ask(ledger, 1)
    ledger.file.close()
    with pytest.raises(RunError, match="cannot be written"):
        promise.settle(RequestResult({}))
    assert promise.outcome is None
    (request,) = Ledger(StateFile(tmp_path), "c").requests(SESSION)
    assert request.promise.outcome is None


def test_commit_that_was_torn_is_as_if_it_was_not(ledger: Ledger, tmp_path: Path) -> None:
    ask(ledger, 1)
    log = tmp_path / f"{REQUESTS}-wal"
    before = log.stat().st_size
    ask(ledger, 2)
    database, frames = (tmp_path / REQUESTS).read_bytes(), log.read_bytes()
    for number, size in enumerate([before, before + 1, (before + len(frames)) // 2, len(frames) - 1, len(frames)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / REQUESTS).write_bytes(database)
        (folder / log.name).write_bytes(frames[:size])
        there = [request.key.number for request in Ledger(StateFile(folder), "c").requests(SESSION)]
        assert there == ([1, 2] if size == len(frames) else [1])


def test_file_of_another_version_is_told(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / REQUESTS) as database:
        database.execute("PRAGMA user_version = 9")
    database.close()
    with pytest.raises(RunError, match="another version"):
        StateFile(tmp_path)
