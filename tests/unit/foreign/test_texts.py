"""Texts of others: encodings, JSON, names of strangers, and what a terminal acts on."""

from __future__ import annotations

import io
import json
import math
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_cli.console import guarded_stream, in_colours, unguarded_stream
from rlinf_core.foreign.strangers import LimitedWarnings, Unproven, origin_of
from rlinf_core.foreign.strict_json import MAX_DEPTH, BadJsonError, load_json, load_json_object, wide_encoding
from rlinf_core.suggest import escaped, replaced
from tests.clock import Clock


@pytest.mark.security
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


@pytest.mark.security
def test_flood_from_one_address_keeps_others() -> None:
    room: Unproven[str] = Unproven(8, from_one=8)
    room.admit("member", "10.0.0.2")
    leaving = [one for number in range(50) for one in room.admit(f"stranger {number}", "10.0.0.9")]
    assert "member" in room.waiting()
    assert leaving == [f"stranger {number}" for number in range(43)]


@pytest.mark.security
def test_connection_that_is_admitted_again_is_the_newest() -> None:
    room: Unproven[str] = Unproven(2, from_one=2)
    room.admit("first", "a")
    room.admit("second", "a")
    room.remove("first")
    room.admit("first", "a")
    assert room.admit("third", "a") == ["second"]


@pytest.mark.security
def test_overdue_connections() -> None:
    room: Unproven[str] = Unproven(4, seconds=5)
    room.admit("early", "a", 100.0)
    room.admit("late", "b", 103.0)
    assert room.remove_overdue(104.9) == []
    assert room.remove_overdue(105.0) == ["early"]
    assert room.remove_all() == ["late"]
    assert not room.remove("late")


@pytest.mark.security
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


@pytest.mark.security
def test_origin_of_unix_socket() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert origin_of(one.getpeername()) == "a local process"


@pytest.mark.security
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


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_wide_text_is_told_with_and_without_a_mark(encoding: str, mark: str) -> None:
    assert wide_encoding(f'{mark}{{"a": 1}}'.encode(encoding)) == encoding[:6].upper()


@pytest.mark.parametrize("start", [b"", b"{", b'{"a"', "é".encode(), b"\xef\xbb\xbf{", b"\0\0\0\0", b"\xff\xff"])
def test_other_bytes_are_no_wide_text(start: bytes) -> None:
    assert wide_encoding(start) is None


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.security
@given(_VALUES)
def test_what_json_holds_comes_back(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False).encode()):
        assert load_json(text) == value


@pytest.mark.security
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "is not JSON: Expecting property name enclosed in double quotes at column 2"),
        ('{"a": "b', "is not JSON: Unterminated string starting at column 7"),
        ("\n[1,\n 2}", "is not JSON: Expecting ',' delimiter at line 3, column 3"),
        ("", "is not JSON"),
        ("NaN", "holds NaN"),
        ('{"a": -Infinity}', "holds -Infinity"),
        ("[1e999]", "holds a number that is too large: 1e999"),
        ("[-1" + "0" * 400 + "]", "holds a number that is too large: -1000000000000000000"),
        ("9" * 5000, "holds an integer of too many digits"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "names the key 'c' twice"),
        (r'["\ud800"]', "holds half of a character"),
        (r'{"\uDc00": 1}', "holds half of a character"),
        ('["\ud800"]', "holds half of a character"),
        ("[" * 200_000, "is nested more than 100 levels deep"),
        ('{"a":' * 200_000, "is nested more than 100 levels deep"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "is nested more than 100 levels deep"),
        (b'"\xff"', "is not UTF-8 text: byte 1"),
        ('"\x01"', "is not JSON"),
    ],
)
def test_text_that_is_refused(text: str | bytes, fault: str) -> None:
    with pytest.raises(BadJsonError, match=fault.replace("(", r"\(").replace("[", r"\[")) as caught:
        load_json(text)
    str(caught.value).encode()


@pytest.mark.security
def test_depth_that_is_allowed() -> None:
    assert load_json("[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH)
    assert load_json("[" + ", ".join(["[]"] * 1000) + "]") == [[]] * 1000


@pytest.mark.security
def test_character_of_two_halves() -> None:
    assert load_json(r'"\ud83d\ude00"') == "😀"
    assert load_json(rb'"a \\ud800 b"') == r"a \ud800 b"


@pytest.mark.security
def test_byte_order_mark() -> None:
    assert load_json(b"\xef\xbb\xbf[1]") == load_json("\ufeff[1]") == [1]


@pytest.mark.security
def test_numbers_that_are_not_finite_where_they_are_taken() -> None:
    assert load_json("[Infinity, 1.5]", non_finite=True) == [math.inf, 1.5]


@pytest.mark.security
def test_object() -> None:
    assert load_json_object('{"a": 1}') == {"a": 1}
    with pytest.raises(BadJsonError, match="is not a JSON object"):
        load_json_object("[1]")


HOSTILE = [
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[H",
    "\x1b]52;c;cm0gLXJmIC8=\x07",
    "\x1bP+q544e\x1b\\",
    "\x9b2J",
    "\x9d0;x\x9c",
    "erased\rshown",
    "\x08\x08\x7f",
    "\x1b[8mhidden",
    "\x1b[5m",
    "\x1b[31;8m",
    "\x1b[?1049h",
    "\x1b[6n",
    "\x1bc",
    "\x1b]8;;http://x\x1b\\link",
    "ab\u202egpj.exe",
    "\u2066x\u2069",
    "a\u2028b",
    "\x0e\x0b\x0c\x00",
]


@pytest.mark.security
@pytest.mark.parametrize("text", HOSTILE)
def test_sequences_are_shown(text: str) -> None:
    for shown in (escaped(text), in_colours(text, True), in_colours(text, False)):
        assert shown.isprintable()
        assert shown != text
    assert len(replaced(text)) == len(text)
    assert not set(replaced(text)) & set("\x1b\x9b\x07\r\u202e")


@pytest.mark.security
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_nothing_that_a_terminal_acts_on_is_left(text: str) -> None:
    acted_on = {*map(chr, range(32)), *map(chr, range(0x7F, 0xA0)), *"\u202a\u202b\u202c\u202d\u202e"} - {"\n", "\t"}
    assert not set(escaped(text)) & acted_on
    assert not set(in_colours(text, False)) & acted_on
    assert in_colours(in_colours(text, True), True) == in_colours(text, True)


@pytest.mark.security
def test_plain_text_stays() -> None:
    text = "naïve\tλ 漢字 😀 שלום\nnext\n"
    assert escaped(text) == in_colours(text, True) == in_colours(text, False) == text
    assert escaped("a\r\nb\r\n") == "a\nb\n"


@pytest.mark.security
def test_colours_stay_where_they_are_shown_and_end_with_the_text() -> None:
    line = "\x1b[1;31mred\x1b[0m \x1b[38;5;200mpink\x1b[m\n"
    assert in_colours(line, True) == line
    assert in_colours(line, False) == "red pink\n"
    assert in_colours("\x1b[31mred\n", True) == "\x1b[31mred\x1b[0m\n"
    assert escaped("\x1b[31mred") == "\\x1b[31mred"


@pytest.mark.security
def test_stream() -> None:
    out = io.StringIO()
    stream = guarded_stream(out, False)
    print("a\x1b[2Jb", 1, file=stream)
    stream.writelines(["c\x07\n"])
    stream.write("\r 10%")
    assert out.getvalue() == "a\\x1b[2Jb 1\nc\\x07\n\r 10%"
    assert not stream.isatty()
    assert unguarded_stream(guarded_stream(stream, True)) is out
