from __future__ import annotations

import pytest

from rlinf_core.errors import EnvironmentVariableError
from rlinf_core.waiting import Deadline, Operation, OperationKind, spell_seconds
from tests.clock import Clock


def test_a_deadline_runs_out(clock: Clock) -> None:
    deadline = Deadline.after(2)
    clock.now += 1.5
    assert deadline.remaining() == 0.5
    assert not deadline.expired
    clock.now += 1
    assert deadline.remaining() == 0
    assert deadline.expired
    assert deadline.seconds == 2


def test_the_default_deadline_is_the_declared_one(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLINF_TIMEOUT", raising=False)
    assert Deadline.after().at == 1900
    monkeypatch.setenv("RLINF_TIMEOUT", "7")
    assert Deadline.after(None).seconds == 7
    monkeypatch.setenv("RLINF_TIMEOUT", "never")
    with pytest.raises(EnvironmentVariableError):
        Deadline.after()


def test_a_timeout_of_nothing_has_passed_at_once(clock: Clock) -> None:
    assert Deadline.after(0).expired


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan")])
def test_no_wait_is_unbounded(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        Deadline.after(seconds)


def test_a_step_of_a_wait_ends_with_it(clock: Clock) -> None:
    deadline = Deadline.after(10)
    assert deadline.sooner(3).at == 103
    assert deadline.sooner(30) is deadline


@pytest.mark.parametrize(
    ("kind", "target", "key", "title", "words"),
    [
        (OperationKind.RECV, "actor:0", None, "recv from actor:0", "waits in recv from actor:0 for 12 s"),
        (OperationKind.SEND_TENSOR, "env:1", None, "send_tensor to env:1", "waits in send_tensor to env:1 for 12 s"),
        (
            OperationKind.QUERY,
            "a",
            "k",
            "query on channel `a`, key `k`",
            "waits for the state of channel `a`, key `k` for 12 s",
        ),
        (OperationKind.CLOSE, "a", "default", "close on channel `a`", "waits until channel `a` is closed for 12 s"),
        (OperationKind.GET, "a", "default", "get on channel `a`", "waits on channel `a` for 12 s"),
        (
            OperationKind.GET_BATCH,
            "a",
            "k",
            "get_batch on channel `a`, key `k`",
            "waits for a batch on channel `a`, key `k` for 12 s",
        ),
        (OperationKind.PUT, "a", None, "put on channel `a`", "waits for room on channel `a` for 12 s"),
        (OperationKind.CALL, "actor.train", None, "call `actor.train`", "waits for `actor.train` for 12 s"),
        (OperationKind.METHOD, "train", None, "method `train`", "runs `train` for 12 s"),
        (OperationKind.IDLE, "", None, "idle", "is idle: no method of it has been called for 12 s"),
        (OperationKind.IDLE, "its `f` returned", None, "idle", "is idle since its `f` returned, 12 s ago"),
    ],
)
def test_an_operation_says_what_it_is(
    kind: OperationKind, target: str, key: str | None, title: str, words: str
) -> None:
    operation = Operation(kind, target, key, since=0, serial=1)
    assert operation.title == title
    assert operation.waits(12.3) == words


def test_an_operation_says_what_it_finds() -> None:
    operation = Operation(OperationKind.GET, "action", None, since=0, serial=1)
    assert operation.waits(3, "empty") == "waits on channel `action`, empty, for 3.0 s"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (12.3, "12 s"), (599, "599 s"), (1800, "30 min"), (9000, "2.5 h")],
)
def test_durations(seconds: float, words: str) -> None:
    assert spell_seconds(seconds) == words
