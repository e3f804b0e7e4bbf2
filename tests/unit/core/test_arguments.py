from __future__ import annotations

from rlinf_core.arguments import as_index, short_repr


class Three:
    def __index__(self) -> int:
        return 3


def test_whole_numbers_of_any_kind() -> None:
    assert (as_index(0), as_index(-2), as_index(Three())) == (0, -2, 3)


def test_what_only_equals_a_whole_number_is_none() -> None:
    assert [as_index(value) for value in (True, 1.0, "1", None, [1])] == [None] * 5


def test_what_was_given_is_one_short_line() -> None:
    assert short_repr("1") == "'1'"
    assert short_repr(Text("a\n  b")) == "a b"
    assert len(short_repr("x" * 1000)) == 80
    assert short_repr(10**10000) == "a very large int"


class Text:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text
