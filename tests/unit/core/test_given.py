from __future__ import annotations

from rlinf_core.given import spelled, whole


class Three:
    def __index__(self) -> int:
        return 3


def test_whole_numbers_of_any_kind() -> None:
    assert (whole(0), whole(-2), whole(Three())) == (0, -2, 3)


def test_what_only_equals_a_whole_number_is_none() -> None:
    assert [whole(value) for value in (True, 1.0, "1", None, [1])] == [None] * 5


def test_what_was_given_is_one_short_line() -> None:
    assert spelled("1") == "'1'"
    assert spelled(Text("a\n  b")) == "a b"
    assert len(spelled("x" * 1000)) == 80
    assert spelled(10**10000) == "a very large int"


class Text:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text
