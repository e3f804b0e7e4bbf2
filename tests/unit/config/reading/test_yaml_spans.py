"""Every node knows exactly where it was written."""

from __future__ import annotations

import pytest

from rlinf_core.config.diagnostics import Diagnostics
from rlinf_core.config.reading import read
from rlinf_core.config.source import SourceText
from rlinf_core.config.tree import MappingNode, Path, ScalarNode, find, key_span


def tree_of(text: str) -> MappingNode:
    diagnostics = Diagnostics()
    tree = read(SourceText("spans.yaml", text), diagnostics)
    assert tree is not None, list(diagnostics)
    assert not len(diagnostics)
    return tree


@pytest.mark.parametrize(
    ("marked", "path"),
    [
        # Scalars
        ("a: «1»\n", ("a",)),
        ("a:   «b c»   # d\n", ("a",)),
        ("a: «'it''s'»  # d\n", ("a",)),
        ('a: «"b\\n"»\n', ("a",)),
        ("a: «b\n  c»\n  # d\ne: 1\n", ("a",)),
        ("a: «'b\n\n  c'»\n", ("a",)),
        ("a: «|\n  b\n  c»\n\n# d\ne: 1\n", ("a",)),
        ("a: «>-\n  b»\n\n\n", ("a",)),
        ("a: «|»\nb: 1\n", ("a",)),
        ("a: «ä\U0001f600»\n", ("a",)),
        ("«a»: 1\n", ("a", "key")),
        ("'x y' : 1\n? «b»\n: 2\n", ("b", "key")),
        ("«'x y'» : 1\n", ("x y", "key")),
        # Empty values are at the end of their key
        ("a«»:\nb: 1\n", ("a",)),
        ("a«»:   # c\nb: 1\n", ("a",)),
        ("b: 1\na«»:", ("a",)),
        ("a«»: &x\nb: 1\n", ("a",)),
        ("a«»: !!null\n", ("a",)),
        ("{a«», b: 1}\n", ("a",)),
        ("{a«»: , b: 1}\n", ("a",)),
        ("a:\n  - 1\n  -«»\n  - 2\n", ("a", 1)),
        ("a:\n  -«» # c\n", ("a", 0)),
        # Block collections end with their last value, not with the comments after it
        ("a:\n  «b: 1\n  c: 2»  # d\n\n# e\nf: 1\n", ("a",)),
        ("a:\n  «- b\n  - c»\n  # d\nf: 1\n", ("a",)),
        ("a:\n«- b\n- c»\n\nf: 1\n", ("a",)),
        ("a:\n  - «b: 1\n    c:\n      d: 2»\n  - e\n", ("a", 0)),
        ("a:\n  «b: 1\n  c»:\n# d\ne: 1\n", ("a",)),
        ("a:\n  «b: |\n    c»\n\ne: 1\n", ("a",)),
        ("«a: 1\nb: 2»\n# c\n", ()),
        # Flow collections include their brackets
        ("a: «[1, 2]»\n", ("a",)),
        ("a: «{b: 1,\n  c: 2}»  # d\n", ("a",)),
        ("a: [1, «[]», 2]\n", ("a", 1)),
        ("a: [«b: 1», 2]\n", ("a", 0)),
        ("a: [1, «? b : c» ]\n", ("a", 1)),
        ("a: [«b: {}»]\n", ("a", 0)),
        # Anchors and tags are not part of the value
        ("a: &x «1»\n", ("a",)),
        ("a: !!str «1»\n", ("a",)),
        ("a: &x !!str «1»\n", ("a",)),
        ("a: !!str &x «1»\n", ("a",)),
        ("a: &x\n  «b: 1»\n", ("a",)),
        ("a: &x\n«- 1»\n", ("a",)),
        ("a: &x «[1]»\n", ("a",)),
        ("a: &x\n  &y «b»: 1\n", ("a", "b", "key")),
        ("a: &x «|\n  b»\nc: 1\n", ("a",)),
        # An alias stands for what it names, where that was written
        ("a: &x «[1]»\nb: *x\n", ("b",)),
        ("a: &x [1, «2»]\nb: {c: *x}\n", ("b", "c", 1)),
        # A collection that ends with an alias ends where that is used
        ("a: &x 1\nb:\n  «c: *x»\nd: 2\n", ("b",)),
        # Carriage returns and characters beyond the basic plane
        ("a: «1»\r\nb: 2\r\n", ("a",)),
        ("\U0001f600: 1\r\nb: «2»\r\n", ("b",)),
    ],
)
def test_spans(marked: str, path: Path) -> None:
    start, end = marked.index("«"), marked.index("»") - 1
    tree = tree_of(marked.replace("«", "").replace("»", ""))
    if path[-1:] == ("key",):
        span = key_span(tree, path[:-1])
    else:
        node = find(tree, path)
        span = node.span if node else None
    assert span is not None
    assert (span.start, span.end) == (start, end)


def test_raw_is_what_was_written_and_value_what_it_means() -> None:
    tree = tree_of("a: 010\nb: '010'\nc: 2.50\nd: yes\ne: |\n  x\nf:\n")
    scalars = [entry.value for entry in tree.entries if isinstance(entry.value, ScalarNode)]
    assert [(s.raw, s.value, s.plain) for s in scalars] == [
        ("010", 10, True),
        ("010", "010", False),
        ("2.50", 2.5, True),
        ("yes", "yes", True),
        ("x\n", "x\n", False),
        ("", None, True),
    ]
