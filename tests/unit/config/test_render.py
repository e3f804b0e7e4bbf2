"""Findings as text."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.render import render_text
from rlinf_core.config.source import SourceText, Span
from tests.unit.config.found import LINES, finding


def caret_line(block: str) -> str:
    return next(line for line in block.splitlines() if set(line.split("|")[-1].strip()) == {"^"})


def test_block_is_the_one_of_the_specification() -> None:
    shown = render_text(finding(LINES, "0-64", help="8 nodes x 8 accelerators; did you mean 0-63?"))
    assert shown == (
        "configs/hetero.yaml:9:18: error[placement-out-of-range]: component `actor` asks for resource 64, but `a800`"
        " has resources 0-63\n"
        "    9 |       placement: 0-64\n"
        "      |                  ^^^^\n"
        "      = 8 nodes x 8 accelerators; did you mean 0-63?"
    )


def test_severity_is_named() -> None:
    assert ": warning[" in render_text(finding(LINES, "0-64", severity=Severity.WARNING))
    assert ": note[" in render_text(finding(LINES, "0-64", severity=Severity.NOTE))


def test_gutter_widens_for_large_line_numbers() -> None:
    text = "\n" * 1_234_566 + "key: value"
    head, line, carets = render_text(finding(text, "value")).splitlines()
    assert head.startswith("configs/hetero.yaml:1234567:6:")
    assert line == "1234567 | key: value"
    assert carets == "        |      ^^^^^"


def test_wide_characters_take_two_columns() -> None:
    carets = caret_line(render_text(finding("标签: 节点 # x\n", "节点")))
    assert carets == "      |       ^^^^"


def test_combining_characters_take_none() -> None:
    carets = caret_line(render_text(finding("e\u0301e\u0301: bad\n", "bad")))
    assert carets == "      |     ^^^"


def test_tabs_are_shown_as_blanks_and_the_caret_follows() -> None:
    _, line, carets = render_text(finding("\ta:\tbad\n", "bad")).splitlines()
    assert line == "    1 |     a:  bad"
    assert carets == "      |         ^^^"


def test_empty_span_gets_one_caret() -> None:
    source = SourceText("f", "key:\n")
    block = render_text(Diagnostic("x", Severity.ERROR, "m", Span(source, 4, 4)))
    assert caret_line(block) == "      |     ^"


def test_empty_file_has_no_excerpt() -> None:
    source = SourceText("f", "")
    assert render_text(Diagnostic("x", Severity.ERROR, "m", Span(source, 0, 0))) == "f: error[x]: m"


def test_only_the_first_line_of_a_span_is_underlined() -> None:
    text = "a: |\n  one\n  two\n"
    block = render_text(finding(text, "|\n  one\n  two"))
    assert caret_line(block) == "      |    ^"


@pytest.mark.parametrize("character", ["\x1b", "\x00", "\x7f", "\u202e", "\u200b", "\x9b", "\r"])
def test_control_characters_never_reach_the_terminal(character: str) -> None:
    text = f"a: x{character}y bad\n"
    diagnostic = finding(text, "bad", name=f"f{character}", message=f"m{character}", help=f"h{character}")
    shown = render_text(diagnostic)
    assert character not in shown
    line, carets = shown.splitlines()[1:3]
    assert line.index("bad") == carets.index("^")


def test_long_line_is_cropped_around_the_caret() -> None:
    text = "a" * 500 + " bad " + "b" * 500 + "\n"
    _, line, carets = render_text(finding(text, "bad")).splitlines()
    assert len(line) <= 160
    assert line.split("| ")[1].startswith("…")
    assert line.endswith("…")
    assert line[carets.index("^") : carets.rindex("^") + 1] == "bad"


def test_line_is_cropped_only_where_something_is_cut() -> None:
    start = render_text(finding("bad " + "b" * 500, "bad")).splitlines()[1]
    assert start.startswith("    1 | bad")
    assert start.endswith("…")
    end = render_text(finding("b" * 500 + " bad", "bad")).splitlines()[1]
    assert end.startswith("    1 | …")
    assert end.endswith(" bad")


def test_one_enormous_line_is_cheap() -> None:
    text = "a" * 2_000_000 + " bad " + "b" * 2_000_000
    diagnostic = finding(text, "bad")
    # Without cropping 50 of them are minutes, and past the test's time limit.
    assert {len(render_text(diagnostic)) < 1000 for _ in range(50)} == {True}


def test_secret_values_are_never_shown() -> None:
    text = "env_vars:\n  - HF_TOKEN: hf_abcdef\n  - WANDB_API_KEY: >\n      wandb_1234\n    NCCL_DEBUG: INFO\n"
    for piece, hidden in (("HF_TOKEN", "hf_abcdef"), ("hf_abcdef", "hf_abcdef"), ("wandb_1234", "wandb_1234")):
        shown = render_text(finding(text, piece))
        assert hidden not in shown
        line, carets = shown.splitlines()[1:3]
        assert carets.count("^") == len(piece)
        assert carets.index("^") == line.index("|") + 2 + finding(text, piece).span.begin.column - 1
    assert "INFO" in render_text(finding(text, "INFO"))


def test_related_places_are_named() -> None:
    diagnostic = finding(LINES, "0-64")
    related = Span(diagnostic.span.source, 0, 7)
    with_related = Diagnostic("x", Severity.ERROR, "m", diagnostic.span, related=((related, "first set at"),))
    assert render_text(with_related).endswith("\n      = first set at: configs/hetero.yaml:1:1")


def test_color_changes_nothing_but_color() -> None:
    import re

    diagnostic = finding(LINES, "0-64", help="help")
    colored = render_text(diagnostic, color=True)
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == render_text(diagnostic)


@given(st.text(max_size=400), st.sampled_from([39, 79, 160]), st.data())
def test_caret_always_stands_under_its_piece(text: str, width: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    source = SourceText("f", text)
    block = render_text(Diagnostic("x", Severity.ERROR, "m", Span(source, start, end)), width=width)
    assert all(character.isprintable() or character in "\n\u3000" for character in block)
    if not text:
        return
    _, line, carets = block.split("\n")
    shown = sum(
        0 if unicodedata.category(c) in ("Mn", "Me") else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in line
    )
    assert shown <= width
    assert carets.rstrip().endswith("^")
    assert len(carets) <= width + 1
