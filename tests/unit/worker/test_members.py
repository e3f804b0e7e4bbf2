"""Whom an operation means, and what is refused because nobody can tell."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import InvalidNameError
from rlinf_core.worker.communication import broadcast_members, source_address


def test_groups_are_named_whole_or_by_ranks() -> None:
    assert broadcast_members(["w", "env:0", ("x", [1, 2])]) == [("w", None), ("env:0", None), ("x", [1, 2])]
    assert broadcast_members(("a", "b")) == [("a", None), ("b", None)]
    assert broadcast_members([("x", range(2))]) == [("x", range(2))]
    assert broadcast_members([("x", 1)]) == [("x", (1,))]
    assert broadcast_members([]) == []


@pytest.mark.parametrize(
    ("groups", "help"),
    [
        ("worker", r"write `\['worker'\]`"),
        (WorkerAddress("w", 0), r"write `\['w:0'\]`"),
        ([("w", 1.5)], r"write `\('w', \[1.5\]\)`"),
        (("w", 1), r'write `\["rollout"\]`'),
        (("w", [0, 1]), r'\[\("rollout", \[0, 1\]\)\]'),
        ([WorkerAddress("w", 0)], r'\[\("rollout", \[0, 1\]\)\]'),
        ([("w", "01")], r"write `\('w', \['01'\]\)`"),
        ([("w", [0], 1)], "rollout"),
        ([0], "rollout"),
        (0, "rollout"),
        (None, "rollout"),
        (b"w", "rollout"),
    ],
    ids=repr,
)
def test_group_without_members_is_refused_with_the_right_form(groups: Any, help: str) -> None:
    with pytest.raises(InvalidNameError, match=help):
        broadcast_members(groups)


def test_a_source_is_a_pair_or_an_address() -> None:
    assert source_address(("w", 1)) == source_address(WorkerAddress("w", 1)) == WorkerAddress("w", 1)
    assert source_address(("env:0", 1)) == WorkerAddress("env", (0, 1))


def test_first_member_is_the_source_where_none_is_given() -> None:
    assert source_address(None, [("w", None), ("x", None)]) == WorkerAddress("w", 0)
    assert source_address(None, [("env:0", (2, 1))]) == WorkerAddress("env", (0, 2))
    with pytest.raises(InvalidNameError):
        source_address(None, [("w", [])])


@pytest.mark.parametrize("src", ["w:0", "wo", 0, None, ("w",), ("w", 0, 1), 1.5], ids=repr)
def test_what_is_no_source_is_refused_with_the_form_that_is(src: Any) -> None:
    with pytest.raises(InvalidNameError, match=r"is not a valid source .*\n.*\n  help: write `\(\"actor\", 0\)`"):
        source_address(src)
