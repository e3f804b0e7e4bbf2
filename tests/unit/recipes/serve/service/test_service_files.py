"""What outlives the server: promises and the order of requests, tenants, saved weights, and the folder of state."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from recipes.language.loopback_server import RequestError
from recipes.serve.service import ledger as module
from recipes.serve.service.ledger import (
    Ledger,
    Outcome,
    Promise,
    RequestFailure,
    RequestKey,
    RequestResult,
)
from recipes.serve.service.state_file import REQUESTS, StateFile, state_folder
from recipes.serve.service.tenants import Keys, Tenants
from recipes.serve.service.weight_store import WeightStore
from rlinf_core import ConfigError
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


def test_keys_are_readable_by_their_owner_alone_and_stay(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", ["ann", "ben"])
    texts = {name: (tmp_path / "keys" / name).read_text().strip() for name in ("ann", "ben")}
    assert all(text.startswith("tml-") for text in texts.values())
    assert {stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) for name in texts} == {0o600}
    assert [keys.tenant(texts[name]) for name in texts] == ["ann", "ben"]
    assert Keys(tmp_path / "keys", ["ann"]).tenant(texts["ann"]) == "ann"
    with pytest.raises(RequestError) as refused:
        keys.tenant("tml-other")
    assert refused.value.status == 401


@pytest.mark.parametrize("text", ["", "\n", "secret", "tml-other\n", "\xfc"])
def test_a_file_without_a_key_of_its_own_is_refused(text: str, tmp_path: Path) -> None:
    for name, key in (("ann", "tml-other"), ("ben", text)):
        (tmp_path / name).write_text(key, encoding="latin-1")
    with pytest.raises(RunError, match=r"ben` has no key of `ben`|cannot be read"):
        Keys(tmp_path, ["ann", "ben"])


def test_silent_sessions_are_those_not_heard_of() -> None:
    now = [0.0]
    tenants = Tenants("b", 120.0, lambda: now[0])
    one, other = tenants.begin("ann"), tenants.begin("ann")
    now[0] = 100.0
    tenants.session("ann", other.session_id)
    now[0] = 130.0
    assert tenants.silent() == [one]
    tenants.end(one)
    with pytest.raises(RequestError) as refused:
        tenants.session("ann", one.session_id)
    assert refused.value.status == 410


SETTINGS = {"server.model_name": "base", "actor.lora_alpha": 32.0}


def test_folder_is_of_one_server_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="another service uses")
    with state_folder(tmp_path / "state", SETTINGS), refused, state_folder(tmp_path / "state", SETTINGS):
        pass
    with state_folder(tmp_path / "state", SETTINGS):
        assert (tmp_path / "state/model.json").exists()


def test_folder_is_of_one_model(tmp_path: Path) -> None:
    with state_folder(tmp_path, SETTINGS):
        pass
    words = "`actor.lora_alpha` was 32.0, and is 16.0"
    with pytest.raises(ConfigError, match=words), state_folder(tmp_path, {**SETTINGS, "actor.lora_alpha": 16.0}):
        pass


def test_damaged_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(RunError, match=r"model\.json"), state_folder(tmp_path, SETTINGS):
        pass


def test_sessions_of_an_earlier_version_are_told(tmp_path: Path) -> None:
    with state_folder(tmp_path, SETTINGS):
        pass
    (tmp_path / "sessions/ab-12").mkdir(parents=True)
    (tmp_path / "sessions/ab-12/journal").touch()
    with pytest.raises(ConfigError, match="sessions/ab-12/journal") as refused, state_folder(tmp_path, SETTINGS):
        pass
    assert f"remove `{tmp_path / 'sessions'}`" in str(refused.value.help)


RUN = "ab12-cd34:train:0"


async def write(folder: str) -> None:
    (Path(folder) / "rlinf_adapter.json").write_text(json.dumps({"rank": 4, "seed": 1}))


async def fail(folder: str) -> None:
    await write(folder)
    raise ValueError("disk")


def store(folder: Path) -> WeightStore:
    return WeightStore(folder / "weights", folder / "sessions", "base")


def save(made: WeightStore, name: str, action: Any = write, **extra: Any) -> str:
    return asyncio.run(made.save("ann", RUN, "weights", name, action, **extra))


def test_saved_weights_are_found_by_their_path(tmp_path: Path) -> None:
    made = store(tmp_path)
    path = save(made, "one", metadata={"who": "ann"})
    assert path == f"tinker://{RUN}/weights/one"
    saved = made.find("ann", path)
    assert (saved.settings.rank, saved.base_model, saved.has_optimizer) == (4, "base", False)
    assert saved.metadata == {"who": "ann"}
    with pytest.raises(RequestError, match="there are no weights"):
        made.find("ben", path)


@pytest.mark.parametrize("name", ["rlinf_saved.json", "rlinf_adapter.json"])
@pytest.mark.parametrize("content", ["", "[]", "7", '{"rank": "4"}', '{"base_model": 1, "expires": "soon", "rank": 0}'])
def test_damaged_weights_are_told_and_kept(tmp_path: Path, name: str, content: str) -> None:
    made = store(tmp_path)
    path = save(made, "one")
    file = tmp_path / "weights/ann" / RUN / "weights/one" / name
    file.write_text(content)
    with pytest.raises(RequestError, match=f"are damaged: `{name}`"):
        made.find("ann", path)
    made.remove_expired()
    assert file.exists()


def test_failed_save_leaves_nothing(tmp_path: Path) -> None:
    made = store(tmp_path)
    save(made, "one", metadata={"number": 1})
    with pytest.raises(ValueError, match="disk"):
        save(made, "one", fail, overwrite=True)
    assert made.find("ann", f"tinker://{RUN}/weights/one").metadata == {"number": 1}
    assert [file.name for file in (tmp_path / "weights/ann" / RUN / "weights").iterdir()] == ["one"]


def test_name_is_taken_until_it_is_overwritten(tmp_path: Path) -> None:
    made = store(tmp_path)
    path = save(made, "one")
    with pytest.raises(RequestError, match="overwrite=True"):
        save(made, "one")
    save(made, "one", overwrite=True, metadata={"number": 2})
    assert made.find("ann", path).metadata == {"number": 2}


def test_expired_weights_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = store(tmp_path)
    paths = [save(made, "one", ttl=10), save(made, "two")]
    made.remove_expired()
    assert [made.find("ann", path).settings.rank for path in paths] == [4, 4]
    later = time.time() + 11
    monkeypatch.setattr(time, "time", lambda: later)
    made.remove_expired()
    assert made.find("ann", paths[1]).settings.rank == 4
    with pytest.raises(RequestError, match="there are no weights"):
        made.find("ann", paths[0])


@pytest.mark.parametrize(
    "path", [None, "", "weights/one", f"tinker://{RUN}/weights/../x", "tinker://../../x/weights/a"]
)
def test_path_of_another_form_is_refused(tmp_path: Path, path: Any) -> None:
    with pytest.raises(RequestError, match="a path of weights is"):
        store(tmp_path).find("ann", path)


def test_request_that_saved_before_is_answered_again(tmp_path: Path) -> None:
    made = store(tmp_path)
    path = save(made, "one", seq_id=3)
    assert save(made, "one", fail, seq_id=3) == path
    with pytest.raises(RequestError, match="overwrite=True"):
        save(made, "one", seq_id=4)
