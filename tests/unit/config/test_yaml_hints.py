"""Well-known slips are told apart, and the caret is where the slip is."""

from __future__ import annotations

import pytest

from rlinf_core.config.diagnostics import Diagnostic, Diagnostics
from rlinf_core.config.reader import decode, read


def only_finding(marked: str) -> tuple[Diagnostic, str]:
    """Return the single finding about a text whose «marked» part is expected to be underlined, and that part."""
    start, end = marked.index("«"), marked.index("»") - 1
    text = marked.replace("«", "").replace("»", "")
    found = Diagnostics()
    source = decode("slip.yaml", text.encode(), found)
    assert source is not None
    assert read(source, found) is None
    (finding,) = found
    assert (finding.span.start, finding.span.end) == (start, end), finding
    return finding, text[start:end]


@pytest.mark.parametrize(
    ("marked", "message", "help"),
    [
        ("a: b«:» c\n", "a second `:`", "`'b: c'`"),
        ("k: a«:»\n", "a second `:`", "`'a:'`"),
        ("a: b«:» c  # why\n", "a second `:`", "`'b: c'`"),
        ("a: 1\n  «b:» 2\n", "already has a value", "align"),
        ("a«:»1\nb: 2\n", "a space is missing", "`a: ...`"),
        ("a: 1\nb«:»2\nc: 3\n", "a space is missing", "`b: ...`"),
        ("a: «%b»  # c\n", "cannot start with `%`", "`'%b'`"),
        ("a: «@it's»\n", "cannot start with `@`", "`'@it''s'`"),
        ("a: «`b`»\n", "cannot start with ```", "quote"),
        ("a: [«|», b]\n", "text block", "quotes"),
        ("a: «*»\n", "starts an alias", "`'*'`"),
        ("a: «& b»\n", "starts an anchor", "quote"),
        ("a: «'x»\nb: 1\n", "never closed", None),
        ('a: «"x»\nb: 1\n', "never closed", None),
        ('a: "C:«\\p»ath"\n', "`\\p` is not an escape", "single quotes"),
        ('a: "x" \nb: "«\\UFFFFFFFF"»\n', "too large", None),
        ("a: «[»1, 2\n", "never closed with `]`", None),
        ("a: {b: 1, c«:»{d: 1}}\n", "a space is missing", "`c: ...`"),
        ("a: {c«:»[1]}\n", "a space is missing", "`c: ...`"),
        ("a: [1, «[»2,\n", "never closed with `]`", None),
        ("a: {b: ']', c: «{»\n", "never closed with `}`", None),
        ("a: «{»b: 1\n", "never closed with `}`", None),
        ("a: [1, 2\nb«:» 3\n", "`,` or `]` is expected", "close it"),
        ("a: {b: 1\nc«:» 2\n", "`,` or `}` is expected", "close it"),
        ("a: 1\n«b»\nc: 2\n", "`key: value` is expected", "add the `:`"),
        ("a:\n    b: 1\n  «c: 2»\n", "fits no line above", "align"),
        ("a: «]»\n", "this is not YAML", None),
        ("a: [1]«]»\n", "closes or separates nothing", "quote"),
        ("a: 1\n«- b»\n", "list item stands among the keys", "indent"),
        ("- a\n«b: 1»\n", "key stands among the items", "align"),
        ("a: 'it'«s'»\n", "text follows the closing `'`", "`'it''s'`"),
        ('a: "b" «c»\n', 'text follows the closing `"`', "escape"),
        ("a: b\t«c»\n", "ends at a tab", "quote"),
        ("a: [b] «c»\n", "text follows the closing `]`", "quote"),
        ("a: {{ b }}«/c»\n", "text follows the closing `}`", "{{ ... }}"),
        ("a: &x 1\nb: *x «c»\n", "nothing more is expected", "quote"),
        ("a: «- b»\n", "a list item cannot start on the line of its key", "lines below"),
        ("%FOO x\n«a: 1»\n", "`---` is expected", "remove"),
        ("-«\t»a: 1\n", "a tab follows", "space"),
        ("# c\n  a: 1\n «b: 2»\n", "does not belong", "align"),
        ("a: «>= 1»\n", "starts a block of text", "`'>= 1'`"),
        ("a: «|99»\n", "starts a block of text", "`'|99'`"),
        ("a: «?» b\n", "this is not YAML", None),
    ],
)
def test_slips(marked: str, message: str, help: str | None) -> None:
    finding, _ = only_finding(marked)
    assert finding.code == "yaml-syntax"
    assert message in finding.message
    assert help is None or help in (finding.help or "")


@pytest.mark.parametrize(
    ("marked", "more"),
    [
        ("a:\n«\t»b: 1\n", ""),
        ("a:\n«\t»b: 1\n\tc: 1\n", "; 1 more line below has one"),
        ("a:\n«\t»b: 1\n\tc: 1\n\n\td: 1\n", "; 2 more lines below have one"),
        ("a:\n  b: 1\n« \t»c: 2\n", ""),
        ("- a\n«\t»- b\n", ""),
        ("a: |\n«\t»text\n", ""),
    ],
)
def test_tabs_that_indent(marked: str, more: str) -> None:
    finding, _ = only_finding(marked)
    assert finding.code == "tab-indentation"
    assert finding.message == f"this line is indented with a tab, which YAML does not allow{more}"


def test_an_undefined_tag_handle_is_an_unknown_tag() -> None:
    finding, _ = only_finding("a: «!foo!bar» x\n")
    assert finding.code == "unknown-tag"


def test_the_opening_bracket_is_shown_too() -> None:
    finding, _ = only_finding("a: [1, 2\nb«:» 3\n")
    ((span, why),) = finding.related
    assert (span.text, why) == ("[", "opened here")


def test_quoted_pieces_stay_short() -> None:
    finding, _ = only_finding("a: «%" + "b" * 5000 + "»\n")
    assert len(finding.message) < 100
    assert len(finding.help or "") < 100
