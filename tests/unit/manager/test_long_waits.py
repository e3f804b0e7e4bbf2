from __future__ import annotations

from rlinf_core.manager.watch import LongWaits
from rlinf_core.waiting import Operation, OperationKind, Publication, PublishedOperation


def waits_told(waits: LongWaits, serial: int, seconds: int, *, kind: OperationKind = OperationKind.RECV) -> list[int]:
    """Return the seconds at which a word is said of an operation that lasts so long and is looked at every second."""
    return [age for age in range(seconds + 1) if waits.due(in_(serial, age, kind=kind))]


def in_(
    serial: int,
    age: float,
    *,
    kind: OperationKind = OperationKind.RECV,
    target: str = "actor:0",
    detached: bool = False,
) -> Publication:
    operation = Operation(kind, target, None, 0.0, serial, detached)
    return Publication((PublishedOperation(operation, age),), 0, False)


def test_first_wait_notice_comes_late_and_others_grow_rarer() -> None:
    assert waits_told(LongWaits(5.0), 1, 100) == [5, 10, 20, 40, 80]


def test_repeated_long_waits_are_reported_in_the_first_step() -> None:
    waits = LongWaits(5.0)
    assert waits_told(waits, 1, 30) == [5, 10, 20]
    assert [waits_told(waits, serial, 30) for serial in (2, 3, 4)] == [[], [], []]
    assert waits_told(waits, 5, 50) == [40]


def test_waits_for_others_have_their_own_words() -> None:
    waits = LongWaits(5.0)
    assert waits_told(waits, 1, 6) == [5]
    assert waits_told(waits, 2, 6, kind=OperationKind.SEND) == [5]


def test_background_operation_is_no_wait_until_awaited() -> None:
    waits = LongWaits(5.0)
    assert not any(waits.due(in_(1, age, detached=True)) for age in range(60))
    assert [age for age in range(60, 70) if waits.due(in_(1, age))] == [65]


def test_calls_and_methods_say_nothing_here() -> None:
    for kind in (OperationKind.METHOD, OperationKind.CALL, OperationKind.LAUNCH, OperationKind.CONNECT):
        assert waits_told(LongWaits(5.0), 1, 100, kind=kind) == []


def test_what_is_told_is_the_operation() -> None:
    waits = LongWaits(1.0)
    assert waits.due(in_(7, 0)) == []
    (output,) = waits.due(in_(7, 2))
    assert output.waits(2) == "waits in recv from actor:0 for 2.0 s"
