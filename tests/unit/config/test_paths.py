"""Paths as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.composing.references import PathSyntaxError, parse_path, to_path
from rlinf_core.config.tree import Path, format_path

_PATHS = st.builds(
    lambda first, rest: (first, *rest), st.text(), st.lists(st.one_of(st.text(), st.integers(0, 10**9 - 1)))
)


@given(_PATHS)
def test_a_formatted_path_reads_back(path: Path) -> None:
    steps, end = parse_path(format_path(path))
    assert to_path(steps) == path
    assert end == len(format_path(path))


@given(_PATHS)
def test_a_formatted_path_ends_at_the_stop(path: Path) -> None:
    text = format_path(path)
    steps, end = parse_path(f"${{{text}}} and more", start=2, stop="}")
    assert to_path(steps) == path
    assert end == 2 + len(text)


@given(st.text(alphabet="ab.[]0=\"'\\ {}"))
def test_any_text_is_read_or_refused_inside_of_it(text: str) -> None:
    try:
        steps, end = parse_path(text, stop="=")
    except PathSyntaxError as error:
        refusal = error
    else:
        assert steps
        assert end == len(text) or text[end] == "="
        return
    assert 0 <= refusal.start <= refusal.end <= len(text) + 1


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("cluster.num_nodes", ("cluster", "num_nodes")),
        (
            "cluster.node_groups[0].env_configs[12].node_ranks",
            ("cluster", "node_groups", 0, "env_configs", 12, "node_ranks"),
        ),
        ("a[0][1]", ("a", 0, 1)),
        ("a.4090.b-c", ("a", "4090", "b-c")),
        ('p."actor,env"', ("p", "actor,env")),
        ("p.actor,env", ("p", "actor,env")),
        ("p.'a.b'", ("p", "a.b")),
        ('"say \\"x\\""', ('say "x"',)),
        ("p.'a\\b'", ("p", "a\\b")),
    ],
)
def test_forms(text: str, path: Path) -> None:
    assert to_path(parse_path(text)[0]) == path


def test_steps_know_their_place() -> None:
    text = 'ab."c.d"[7]'
    steps, _ = parse_path(text)
    assert [text[step.start : step.end] for step in steps] == ["ab", '"c.d"', "[7]"]


@pytest.mark.parametrize(
    ("text", "piece", "words"),
    [
        ("", "", "missing"),
        ("a..b", ".", "missing"),
        ("a.", "", "missing"),
        (".a", ".", "missing"),
        ("[0].a", "[", "starts with a name"),
        ("a.[0]", ".", "before the index"),
        ("a[x]", "[x]", "not the index"),
        ("a[-1]", "[-1]", "not the index"),
        ("a[1", "[1", "never closed"),
        ('a."b', '"b', "never closed"),
        ('"a\\x"', "\\x", "not an escape"),
        ("a b", " ", "is not valid here"),
        ("a. b", " ", "white space"),
        ("a.${b}", "{", "is not valid here"),
        ("a[99999999999]", "[99999999999]", "not the index"),
    ],
)
def test_what_is_refused_is_pointed_at(text: str, piece: str, words: str) -> None:
    with pytest.raises(PathSyntaxError, match=words) as caught:
        parse_path(text)
    assert text[caught.value.start : caught.value.end] == piece
