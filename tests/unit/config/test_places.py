"""Which span a finding about a path underlines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlinf_core.config.tree import MappingNode, Path, find, naming, part, place

TreeOf = Callable[..., MappingNode]

TEXT = """\
top:
  list:
    - a: 1  # comment
      b: 2

    # more
    - [x, y]
    -
      - z
  empty:
  flow: {k: v}
"""


@pytest.mark.parametrize(
    ("path", "underlined"),
    [
        ((), ""),
        (("top",), "top"),
        (("top", "list"), "list"),
        (("top", "list", 0), "a: 1"),
        (("top", "list", 0, "b"), "2"),
        (("top", "list", 1), "[x, y]"),
        (("top", "list", 1, 1), "y"),
        (("top", "list", 2), "- z"),
        (("top", "empty"), "empty"),
        (("top", "flow"), "flow"),
        (("top", "nope"), "top"),
        (("top", "list", 0, "c"), "a: 1"),
        (("nope", "x"), ""),
    ],
)
def test_place(tree_of: TreeOf, path: Path, underlined: str) -> None:
    tree = tree_of(TEXT)
    span = place(tree, path)
    assert span.text == underlined
    if not underlined:
        assert span.start == 0


def test_naming_underlines_keys_even_of_scalars(tree_of: TreeOf) -> None:
    tree = tree_of(TEXT)
    assert naming(tree, ("top", "list", 0, "b")).text == "b"


def test_mapping_composed_of_two_sources_has_a_first_line(composing: Callable[..., object]) -> None:
    from rlinf_core.config.composing.compose import Composed

    composed, _ = composing(  # type: ignore[misc]  # the fixture is a plain callable
        "a:\n" + "#" * 500 + "\n  - {b: 1}\n", "a[0]={}", "a[0].c=2"
    )
    assert isinstance(composed, Composed)
    assert place(composed.tree, ("a", 0)).text in ("{}", "c", "c=2")


@pytest.mark.parametrize(
    ("written", "piece"),
    [
        ("abcdef", "cd"),
        ("'abcdef'", "cd"),
        ('"abcdef"', "cd"),
        ('"ab\\x63def"', None),
        ("'it''s a b'", None),
        ("ab\n  cdef", None),
    ],
)
def test_part_of_a_scalar(tree_of: TreeOf, written: str, piece: str | None) -> None:
    span = part(find(tree_of(f"a: {written}\n"), ("a",)), 2, 4)
    assert (span.text if span else None) == piece


def test_empty_part_is_one_character_wide(tree_of: TreeOf) -> None:
    span = part(find(tree_of("a: bc\n"), ("a",)), 1, 1)
    assert span is not None
    assert span.text == "c"


def test_part_of_what_is_no_scalar(tree_of: TreeOf) -> None:
    assert part(find(tree_of("a: [b]\n"), ("a",)), 0, 1) is None
