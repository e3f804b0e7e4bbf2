"""Well-known slips are told apart, and the caret is where the slip is."""

from __future__ import annotations

import pytest

from rlinf_core.config.diagnostics import Diagnostic, Diagnostics
from rlinf_core.config.reading import decode, read


def only_finding(marked: str) -> tuple[Diagnostic, str]:
    """Return the single finding about a text whose «marked» part is expected to be underlined, and that part."""
    start, end = marked.index("«"), marked.index("»") - 1
    text = marked.replace("«", "").replace("»", "")
    diagnostics = Diagnostics()
    source = decode("slip.yaml", text.encode(), diagnostics)
    assert source is not None
    assert read(source, diagnostics) is None
    (finding,) = diagnostics
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


def test_the_opening_bracket_is_shown_too() -> None:
    finding, _ = only_finding("a: [1, 2\nb«:» 3\n")
    ((span, why),) = finding.related
    assert (span.text, why) == ("[", "opened here")


def test_quoted_pieces_stay_short() -> None:
    finding, _ = only_finding("a: «%" + "b" * 5000 + "»\n")
    assert len(finding.message) < 100
    assert len(finding.help or "") < 100
