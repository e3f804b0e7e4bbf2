"""Text that others wrote, on a terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_cli.console.terminal_stream import guarded_stream, in_colours, unguarded_stream
from rlinf_core.foreign.terminal_text import escaped, replaced

pytestmark = pytest.mark.security

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


@pytest.mark.parametrize("text", HOSTILE)
def test_sequences_are_shown(text: str) -> None:
    for shown in (escaped(text), in_colours(text, True), in_colours(text, False)):
        assert shown.isprintable()
        assert shown != text
    assert len(replaced(text)) == len(text)
    assert not set(replaced(text)) & set("\x1b\x9b\x07\r\u202e")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_nothing_that_a_terminal_acts_on_is_left(text: str) -> None:
    acted_on = {*map(chr, range(32)), *map(chr, range(0x7F, 0xA0)), *"\u202a\u202b\u202c\u202d\u202e"} - {"\n", "\t"}
    assert not set(escaped(text)) & acted_on
    assert not set(in_colours(text, False)) & acted_on
    assert in_colours(in_colours(text, True), True) == in_colours(text, True)


def test_plain_text_stays() -> None:
    text = "naïve\tλ 漢字 😀 שלום\nnext\n"
    assert escaped(text) == in_colours(text, True) == in_colours(text, False) == text
    assert escaped("a\r\nb\r\n") == "a\nb\n"


def test_colours_stay_where_they_are_shown_and_end_with_the_text() -> None:
    line = "\x1b[1;31mred\x1b[0m \x1b[38;5;200mpink\x1b[m\n"
    assert in_colours(line, True) == line
    assert in_colours(line, False) == "red pink\n"
    assert in_colours("\x1b[31mred\n", True) == "\x1b[31mred\x1b[0m\n"
    assert escaped("\x1b[31mred") == "\\x1b[31mred"


def test_stream() -> None:
    out = io.StringIO()
    stream = guarded_stream(out, False)
    print("a\x1b[2Jb", 1, file=stream)
    stream.writelines(["c\x07\n"])
    stream.write("\r 10%")
    assert out.getvalue() == "a\\x1b[2Jb 1\nc\\x07\n\r 10%"
    assert not stream.isatty()
    assert unguarded_stream(guarded_stream(stream, True)) is out
