"""Connections that have proved nothing yet."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.foreign.strangers import LimitedWarnings, Unproven, origin_of
from tests.clock import Clock

pytestmark = pytest.mark.security


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=200), st.integers(1, 12))
def test_newcomers_are_let_in_and_limits_hold(comers: list[tuple[int, bool]], most: int) -> None:
    room: Unproven[list[int]] = Unproven(most)
    waiting: list[list[int]] = []
    for address, proves in comers:
        newcomer = [address]
        leaving = room.admit(newcomer, str(address))
        waiting = [one for one in [*waiting, newcomer] if not any(one is other for other in leaving)]
        assert not any(newcomer is one for one in leaving)
        assert sorted(map(id, room.waiting())) == sorted(map(id, waiting))
        assert len(waiting) <= most
        assert sum(one == newcomer for one in waiting) <= max(1, most // 2)
        if proves:
            assert room.remove(newcomer)
            waiting = [one for one in waiting if one is not newcomer]


def test_flood_from_one_address_keeps_others() -> None:
    room: Unproven[str] = Unproven(8, from_one=8)
    room.admit("member", "10.0.0.2")
    leaving = [one for number in range(50) for one in room.admit(f"stranger {number}", "10.0.0.9")]
    assert "member" in room.waiting()
    assert leaving == [f"stranger {number}" for number in range(43)]


def test_connection_that_is_admitted_again_is_the_newest() -> None:
    room: Unproven[str] = Unproven(2, from_one=2)
    room.admit("first", "a")
    room.admit("second", "a")
    room.remove("first")
    room.admit("first", "a")
    assert room.admit("third", "a") == ["second"]


def test_overdue_connections() -> None:
    room: Unproven[str] = Unproven(4, seconds=5)
    room.admit("early", "a", 100.0)
    room.admit("late", "b", 103.0)
    assert room.remove_overdue(104.9) == []
    assert room.remove_overdue(105.0) == ["early"]
    assert room.remove_all() == ["late"]
    assert not room.remove("late")


@pytest.mark.parametrize(
    ("peer", "origin"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("2001:db8:1:2:3::4", 5, 0, 0), "2001:db8:1:2::"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        ("", "a local process"),
        (b"\0name", "a local process"),
    ],
)
def test_origin(peer: object, origin: str) -> None:
    assert origin_of(peer) == origin


def test_origin_of_unix_socket() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert origin_of(one.getpeername()) == "a local process"


def test_warnings_beyond_the_limit_are_counted() -> None:
    clock, output = Clock(), list[str]()
    warn = LimitedWarnings(output.append, most=3, seconds=60, clock=clock)
    for _ in range(100):
        warn("a stranger")
    assert output == ["a stranger", "a stranger", "a stranger; further ones within 60 s are only counted"]
    clock.now += 60
    warn("a stranger")
    assert output[3:] == ["97 more warnings of that kind were left out", "a stranger"]
    for _ in range(4):
        warn("a stranger")
    warn.close()
    assert output[-1] == "2 more warnings of that kind were left out"
    warn.close()
    assert output[-2] != output[-1]
