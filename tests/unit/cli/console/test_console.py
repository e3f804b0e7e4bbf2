"""Streams, colours and tables."""

from __future__ import annotations

import pytest

from rlinf_cli.console import console


class Terminal:
    """Standard output as a terminal of a given width."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")


def test_styles_reach_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert console.style("x", "red") == "x"
    Terminal(monkeypatch, 80)
    assert console.style("x", "red") == "\x1b[1;31mx\x1b[0m"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_may_refuse_colours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    Terminal(monkeypatch, 80)
    monkeypatch.setenv(name, value)
    assert not console.colored()


def test_an_empty_no_color_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(monkeypatch, 80)
    monkeypatch.setenv("NO_COLOR", "")
    assert console.colored()


def test_a_table_is_never_folded_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    wide = "0-1," * 200
    lines = console.table(("name", "ranks"), [("actor", wide)]).splitlines()
    assert lines == ["name   ranks", f"actor  {wide}"]


def test_a_table_is_folded_to_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(monkeypatch, 60)
    monkeypatch.setenv("NO_COLOR", "1")
    lines = console.table(("name", "ranks"), [("actor", "0-1," * 40), ("rollout", "7")]).splitlines()
    assert max(map(len, lines)) <= 60
    assert "".join(line[9:].strip() for line in lines[1:-1]) == "0-1," * 40
    assert lines[-1].split() == ["rollout", "7"]


def test_table_cells_are_text_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    assert "[a800]" in console.table(("", ""), [("[a800]", "[red]x[/red]")])
    assert "[red]x[/red]" in console.table(("", ""), [("[a800]", "[red]x[/red]")])


def test_messages_are_dropped_when_quiet_and_errors_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.verbosity, "quiet", True)
    console.message("beside")
    console.error("wrong")
    console.result("42")
    out, err = capsys.readouterr()
    assert (out, err) == ("42\n", "wrong\n")


def test_an_error_is_one_block(capsys: pytest.CaptureFixture[str]) -> None:
    console.error_block("it broke", where="node 3", why="no route\nto host", do="plug it in")
    assert capsys.readouterr().err == (
        "error: it broke\n  where: node 3\n    why: no route\n         to host\n     do: plug it in\n"
    )


def test_a_long_name_does_not_squeeze_the_other_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Terminal(monkeypatch, 60)
    monkeypatch.setenv("NO_COLOR", "1")
    lines = console.table(("name", "ranks"), [("component-" * 8, "0-63,70-77"), ("rollout", "7")]).splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.endswith("0-63,70-77") for line in lines)


def test_json_holds_no_character_that_a_terminal_acts_on(capsys: pytest.CaptureFixture[str]) -> None:
    console.result_json({"a": "\x1b\x7f\x9b环"})
    out = capsys.readouterr().out
    assert out == '{\n  "a": "\\u001b\\u007f\\u009b环"\n}\n'
