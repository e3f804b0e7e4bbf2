"""What is printed, and where: pipes, terminals, full disks."""

from __future__ import annotations

import errno
import io
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_message_without_room_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full()
    monkeypatch.setattr(sys, "stderr", full)
    console.error("the disk is full")
    assert full.getvalue() == ""


def test_result_without_room_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space left"):
        console.result("42")


pexpect: Any = pytest.importorskip("pexpect")

RLINF = Path(sys.executable).with_name("rlinf")
WIDE = ("inspect", "placement", "hetero18", "--assume", "a800=8", "--assume", "4090=8")
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def terminal(tmp_path: Path) -> Run:
    """Runs a command on a terminal of 80 columns; the exit code and all that was shown, escapes included."""

    def run(*arguments: str, **environ: str) -> tuple[int, str]:
        hidden = ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        child = pexpect.spawn(
            str(RLINF),
            list(arguments),
            cwd=str(tmp_path),
            env=environment | {"TERM": "xterm-256color"} | environ,
            dimensions=(200, 80),
            timeout=60,
            encoding="utf-8",
        )
        child.expect(pexpect.EOF)
        child.close()
        return child.exitstatus, child.before.replace("\r\n", "\n")

    return run


def plain(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize(
    "arguments",
    [
        WIDE,
        (*WIDE, "--tree"),
        (*WIDE, "--all"),
        ("inspect", "env", *WIDE[2:], "--component", "actor", "--rank", "3"),
        ("explain",),
        ("explain", "cluster.node_groups"),
        ("explain", "placement-out-of-range"),
        ("recipes",),
        ("--help",),
        ("validate", "--help"),
    ],
    ids=" ".join,
)
def test_nothing_is_wider_than_the_terminal(terminal: Run, arguments: tuple[str, ...]) -> None:
    code, shown = terminal(*arguments)
    assert code == 0
    assert [line for line in plain(shown).splitlines() if len(line) > 80] == []


def test_the_summary_stays_a_table_on_80_columns(terminal: Run) -> None:
    _, shown = terminal(*WIDE)
    lines = plain(shown).splitlines()
    header = next(line for line in lines if line.startswith("component"))
    rows = [line for line in lines if line.startswith(("actor", "rollout", "env", "agent"))]
    assert len(rows) == 4
    column = header.index("nodes")
    assert [row[column:].split()[0] for row in rows] == ["0-7", "8-15", "16-17", "0-3"]


def test_long_line_is_cropped_around_its_caret(terminal: Run, tmp_path: Path) -> None:
    group = "{label: a, node_ranks: 0, accelerators: {model: A800, per_node: 8}, hosts: [trainer00], ssh: {port: 0}}"
    (tmp_path / "wide.yaml").write_text(f"cluster: {{num_nodes: 1, node_groups: [{group}]}}\n")
    code, shown = terminal("validate", "wide.yaml", NO_COLOR="1")
    assert code == 2
    line, carets = next((above, below) for above, below in itertools.pairwise(shown.splitlines()) if "^" in below)
    assert max(len(line), len(carets)) <= 80
    assert line[carets.index("^")] == "0"


def test_colours_on_a_terminal_only(terminal: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("cluster: {num_nodes: 0}\n")
    code, shown = terminal("validate", "bad.yaml")
    assert code == 2
    assert "\x1b[1;31merror[" in shown
    for refusal in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        code, shown = terminal("validate", "bad.yaml", **refusal)
        assert code == 2
        assert "\x1b" not in shown
    code, shown = terminal(*WIDE, NO_COLOR="1")
    assert "\x1b" not in shown


@pytest.mark.parametrize("after", [0.05, 0.12, 0.14])
def test_terminal_reading_is_announced_and_ends_on_ctrl_c(tmp_path: Path, after: float) -> None:
    child = pexpect.spawn(str(RLINF), ["validate", "-"], cwd=str(tmp_path), timeout=30, encoding="utf-8")
    child.delaybeforesend = after
    child.expect("reading standard input; end it with Ctrl-D")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert "Traceback" not in child.before
    assert child.exitstatus == 130


def test_typing_a_file_in(tmp_path: Path) -> None:
    child = pexpect.spawn(str(RLINF), ["validate", "-"], cwd=str(tmp_path), timeout=30, encoding="utf-8")
    child.expect("reading standard input")
    child.sendline("cluster: {num_nodes: 1}")
    child.sendeof()
    child.expect("standard input: valid")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
