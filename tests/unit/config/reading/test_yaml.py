"""YAML: where nodes stand, what scalars mean, hints after slips, and the yaml-test-suite."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.reading import decode, read_document
from rlinf_core.config.tree import Path as TreePath
from rlinf_core.config.tree import ScalarNode, find, key_span, resolve_plain, to_data
from tests.unit.config.texts import read_text, tree_of


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
def test_spans(marked: str, path: TreePath) -> None:
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


# A scalar as it is written, and what it means in Python.
VALUES = """
    ~ None, null None, Null None, NULL None, true True, True True, FALSE False,
    0 0, -7 -7, +7 7, 010 10, 0644 644, 0o10 8, 0x1F 31, 0xff 255,
    1.5 1.5, 2.50 2.5, 1. 1.0, .5 0.5, -.5 -0.5, 5e5 5e5, 1e3 1000.0, 1E-3 0.001
"""
# Booleans, binary and sexagesimal numbers, underscores and dates of YAML 1.1, and near misses of 1.2.
TEXTS = """
    on off yes no y n nULL tRUE 0b11 1_000 1:20 1:2 0-7 2024-01-01 0o8 0xg -0x1 -0o7 + - . .. 1e e5 .e5 1.2.3
    10.10.10.1 0-1:0-199 nan inf .infinity +.nan 12a ١٢ ²
"""


@pytest.mark.parametrize("row", VALUES.replace("\n", " ").split(","))
def test_core_schema(row: str) -> None:
    raw, expected = row.split()
    assert repr(resolve_plain(raw)) == repr(ast.literal_eval(expected))


def test_an_empty_scalar_infinities_and_no_number() -> None:
    assert resolve_plain("") is None
    assert [resolve_plain(raw) for raw in (".inf", "+.Inf", "-.INF")] == [math.inf, math.inf, -math.inf]
    for raw in (".nan", ".NaN", ".NAN"):
        value = resolve_plain(raw)
        assert isinstance(value, float)
        assert math.isnan(value)


@pytest.mark.parametrize("raw", TEXTS.split())
def test_everything_else_is_text(raw: str) -> None:
    assert resolve_plain(raw) == raw


def test_a_huge_number_does_not_raise() -> None:
    digits = "9" * 5000
    assert resolve_plain(digits) == digits
    assert resolve_plain("0x" + "f" * 5000) == "0x" + "f" * 5000
    assert resolve_plain("9" * 1000) == 10**1000 - 1
    assert resolve_plain("1e999") == math.inf


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_round_trip(number: float) -> None:
    assert resolve_plain(repr(number)) == number


@given(st.text())
def test_any_text_has_a_value(raw: str) -> None:
    value = resolve_plain(raw)
    assert value is None or isinstance(value, bool | int | float) or value == raw


def only_finding(marked: str) -> tuple[Diagnostic, str]:
    """Return the single finding about a text whose «marked» part is expected to be underlined, and that part."""
    start, end = marked.index("«"), marked.index("»") - 1
    text = marked.replace("«", "").replace("»", "")
    tree, (finding,) = read_text(text)
    assert tree is None
    assert (finding.span.start, finding.span.end) == (start, end), finding
    return finding, text[start:end]


@pytest.mark.parametrize(
    ("marked", "message", "help"),
    [
        ("a: b«:» c\n", "a complete value", "quote the value"),
        ("k: a«:»\n", "a complete value", "quote the value"),
        ("a: b«:» c  # why\n", "a complete value", "quote the value"),
        ("a: 1\n  b«:» 2\n", "a complete value", "aligned"),
        ("a«:»1\nb: 2\n", "a space is missing", "`a: ...`"),
        ("a: 1\nb«:»2\nc: 3\n", "a space is missing", "`b: ...`"),
        ("a«：»1\nb: 2\n", "this `：` is not the `:` of YAML", "`a: ...`"),
        ("a: «%b»  # c\n", "cannot start with `%`", "`'%b'`"),
        ("a: «@it's»\n", "cannot start with `@`", "`'@it''s'`"),
        ("a: «`b`»\n", "cannot start with ```", "quote"),
        ("a: [«|, b]»\n", "cannot start with `|`", "quote it"),
        ("a: «*»\n", "cannot start with `*`", "`'*'`"),
        ("a: «& b»\n", "cannot start with `&`", "quote"),
        ("a: «'x»\nb: 1\n", "never closed", None),
        ('a: «"x»\nb: 1\n', "never closed", None),
        ('a: "C:«\\p»ath"\n', "`\\p` is not a YAML escape", "single quotes"),
        ('a: "x" \nb: "\\U«FFFFFFFF"»\n', "too large", None),
        ("a: «[»1, 2\n", "never closed with `]`", None),
        ("a: {b: 1, c:«{»d: 1}}\n", "`,` or `}` is expected", "quote the value"),
        ("a: [1, «[»2,\n", "never closed with `]`", None),
        ("a: {b: ']', c: «{»\n", "never closed with `}`", None),
        ("a: «{»b: 1\n", "never closed with `}`", None),
        ("a: [1, 2\nb«:» 3\n", "`,` or `]` is expected", "close it"),
        ("a: {b: 1\nc«:» 2\n", "`,` or `}` is expected", "close it"),
        ("a: 1\n«b»\nc: 2\n", "`key: value` is expected", "add the `:`"),
        ("a:\n    b: 1\n  «c: 2»\n", "matches no line above", "align"),
        ("a: «]»\n", "this is not YAML", None),
        ("a: [1]«]»\n", "follows a complete value", "quote"),
        ("a: 1\n«- b»\n", "mixed at one level", "indent"),
        ("- a\n«b: 1»\n", "mixed at one level", "start the key"),
        ("a: 'it'«s'»\n", "follows a complete value", "write `''` for one"),
        ('a: "b" «c»\n', "follows a complete value", "quote the whole value"),
        ("a: [b] «c»\n", "follows a complete value", "quote"),
        ("a: {{ b }}«/c»\n", "follows a complete value", "{{ ... }}"),
        ("a: &x 1\nb: *x «c»\n", "follows a complete value", "quote"),
        ("a: «- b»\n", "a list item cannot start on the line of its key", "lines below"),
        ("%FOO x\n«a: 1»\n", "matches no line above", "align"),
        ("-«\t»a: 1\n", "a tab follows", "space"),
        ("-«\t»- 1\n", "a tab follows", "space"),
        ("? -«\t»- 1\n", "a tab follows", "space"),
        ("a: [1]«#c»\n", "without a blank", None),
        ("a: |\n     \n«  »b\n".replace("«  »b", "  «b»"), "follows a complete value", None),
        ("# c\n  a: 1\n «b: 2»\n", "matches no line above", "align"),
        ("a: «>= 1»\n", "cannot start with `>`", "`'>= 1'`"),
        ("a: «|99»\n", "cannot start with `|`", "`'|99'`"),
        ("a: «?» b\n", "this is not YAML", None),
    ],
)
def test_slips(marked: str, message: str, help: str | None) -> None:
    finding, _ = only_finding(marked)
    assert finding.code == "yaml-syntax"
    assert message in finding.message
    assert help is None or help in (finding.help or "")


@pytest.mark.parametrize(
    "marked",
    [
        "a:\n«\t»b: 1\n",
        "a:\n«\t»b: 1\n\tc: 1\n",
        "a:\n  b: 1\n« \t»c: 2\n",
        "a: 'x'\n« \t»b: 2\n",
        "- a\n«\t»- b\n",
        "a: |\n«\t»text\n",
    ],
)
def test_tabs_that_indent(marked: str) -> None:
    finding, _ = only_finding(marked)
    assert finding.code == "tab-indentation"
    assert finding.message == "this line is indented with a tab, which YAML does not allow"


def test_an_undefined_tag_handle_is_an_unknown_tag() -> None:
    finding, _ = only_finding("a: «!foo!bar» x\n")
    assert finding.code == "unknown-tag"


def test_quoted_pieces_stay_short() -> None:
    finding, _ = only_finding("a: «%" + "b" * 5000 + "»\n")
    assert max(len(finding.message), len(finding.help or "")) < 100


def test_the_opening_bracket_is_shown_too() -> None:
    finding, _ = only_finding("a: [1, 2\nb«:» 3\n")
    ((span, why),) = finding.related
    assert (span.text, why) == ("[", "opened here")


CASES = Path(__file__).parents[3] / "data" / "yaml-test-suite" / "cases.jsonl"

# Valid YAML that is refused, by the code that says so.
REFUSED = {
    # A configuration is one document of plain data, and its keys are names.
    "several-documents": "35KP 6XDY 6ZKB 7Z25 9DXL 9KAX JHB9 KSS4 L383 M7A3 PUW8 RZT7 U9NS W4TN",
    "unknown-tag": "2XXW 565N 5TYM 6CK3 6WLZ 7FWL 9WXW C4HZ CC74 CUP7 J7PZ M5C3 P76L UGM3 Z67P Z9M4",
    "complex-key": "4FJ6 6BFJ 6PBE KK5P LX3P M2N8/01 M5DY Q9WF RZP5 SBG9 V9D5 X38W XW4D",
    "null-key": "2JQS 6M2F DFF7 FH7J FRK4 M2N8/00 NHX8 NKF9 PW8X S3PD SM9W/01 UKK6/00",
    # What another version would mean by `on` or `010` is not what is read.
    "yaml-version": "BEC7 MUS6/02 MUS6/03 MUS6/04",
    # A tab below a space in the indentation, and one that starts a further line of an unquoted text: nobody sees it.
    "tab-indentation": "DK95/00 HS5T UV7Q",
    # What ruamel.yaml refuses: keys over several lines in braces, `[: a]`, `...` before any content, blocks of text
    # below deeper empty lines.
    "yaml-syntax": "4MUZ/00 4MUZ/01 4MUZ/02 4QFQ 5MUD 652Z 9MMW 9SA2 CFD4 DWX9 HM87/01 HWV9 K3WX NB6Z NJ66 QT73 R4YG"
    " T26H UT92 VJP3/01 WZ62",
}

# What is no YAML and is read all the same: it can mean but one thing.
ACCEPTED = {
    "9C9N": "lines within brackets need no indentation: `key: {` is closed by a `}` in the first column everywhere",
    "G5U8": "a `-` within brackets is a text",
    "YJV2": "the same",
    "Y79Y/003": "the same, of a line that starts with a tab",
    "DK95/01": "lines of a quoted text need no indentation",
    "QB6E": "the same, without a tab",
    "9MMA": "a `%YAML` line alone is a file without content, which `read` refuses",
    "Y79Y/000": "a block of text that holds a tab alone is empty",
}


class Case(NamedTuple):
    id: str
    text: str
    fail: bool
    documents: list[Any] | None


def cases() -> Iterator[Case]:
    for line in CASES.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        yield Case(case["id"], case["yaml"], case.get("fail", False), case.get("json"))


@cache
def reading(text: str) -> tuple[str | None, object]:
    """Return the code of the first error, None for a text without one, and the value."""
    diagnostics = Diagnostics()
    source = decode("case.yaml", text.encode(), diagnostics)
    root = read_document(source, diagnostics)[1] if source else None
    errors = [finding.code for finding in diagnostics if finding.severity is Severity.ERROR]
    return (errors[0] if errors else None), None if root is None else to_data(root)


def test_all_cases_are_there() -> None:
    assert len(list(cases())) == 402


def test_no_value_is_another_one() -> None:
    wrong: list[str] = []
    for case in cases():
        error, value = reading(case.text)
        if not case.fail and error is None and case.documents is not None and [value] != (case.documents or [None]):
            wrong.append(f"{case.id}: {value!r} for {case.documents!r}")
    assert wrong == []


def test_refused_valid_cases_are_those_agreed() -> None:
    refused: dict[str, list[str]] = {}
    for case in cases():
        error, _ = reading(case.text)
        if not case.fail and error is not None:
            refused.setdefault(error, []).append(case.id)
    assert {code: " ".join(sorted(ids)) for code, ids in refused.items()} == REFUSED


def test_accepted_invalid_cases_are_those_agreed() -> None:
    accepted = {case.id for case in cases() if case.fail and reading(case.text)[0] is None}
    assert accepted == set(ACCEPTED)
