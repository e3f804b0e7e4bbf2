"""What is printed, and where: pipes, terminals, full disks."""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli import console


@pytest.fixture
def terminal_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Make standard output a terminal, of so many columns, with variables."""

    def make(columns: int, **environ: str) -> None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in {"COLUMNS": str(columns), "TERM": "xterm-256color", **environ}.items():
            monkeypatch.setenv(name, value)

    return make


def test_styles_reach_a_terminal_only(terminal_of: Callable[..., None]) -> None:
    assert console.style("x", "red") == "x"
    terminal_of(80)
    assert console.style("x", "red") == "\x1b[1;31mx\x1b[0m"


@pytest.mark.parametrize(
    ("environ", "colored"), [({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)]
)
def test_a_terminal_may_refuse_colours(
    terminal_of: Callable[..., None], environ: dict[str, str], colored: bool
) -> None:
    terminal_of(80, **environ)
    assert console.colored() is colored


def test_a_table_is_never_folded_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    wide = "0-1," * 200
    lines = console.table(("name", "ranks"), [("actor", wide)]).splitlines()
    assert lines == ["name   ranks", f"actor  {wide}"]


def test_a_table_is_folded_to_the_terminal(terminal_of: Callable[..., None]) -> None:
    terminal_of(60, NO_COLOR="1")
    lines = console.table(("name", "ranks"), [("actor", "0-1," * 40), ("rollout", "7")]).splitlines()
    assert max(map(len, lines)) <= 60
    assert "".join(line[9:].strip() for line in lines[1:-1]) == "0-1," * 40
    assert lines[-1].split() == ["rollout", "7"]
    # A long name does not squeeze the other columns.
    lines = console.table(("name", "ranks"), [("component-" * 8, "0-63,70-77"), ("rollout", "7")]).splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.endswith("0-63,70-77") for line in lines)


def test_table_cells_are_text_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    shown = console.table(("", ""), [("[a800]", "[red]x[/red]")])
    assert "[a800]" in shown
    assert "[red]x[/red]" in shown


def test_messages_are_dropped_when_quiet_and_errors_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.verbosity, "quiet", True)
    console.message("beside")
    console.error_block("it broke", where="node 3", why="no route\nto host", do="plug it in")
    console.result("42")
    out, err = capsys.readouterr()
    assert out == "42\n"
    assert err == "error: it broke\n  where: node 3\n    why: no route\n         to host\n     do: plug it in\n"


def test_json_holds_no_character_that_a_terminal_acts_on(capsys: pytest.CaptureFixture[str]) -> None:
    console.result_json({"a": "\x1b\x7f\x9b环"})
    out = capsys.readouterr().out
    assert out == '{\n  "a": "\\u001b\\u007f\\u009b环"\n}\n'


def test_json_has_null_for_a_number_that_is_not_finite() -> None:
    assert json.loads(console.json_text({"a": [math.nan, (math.inf, 1.5)], "b": {"c": -math.inf}})) == {
        "a": [None, [None, 1.5]],
        "b": {"c": None},
    }


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
WIDE = "inspect placement hetero18 --assume a800=8 --assume 4090=8"
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


@pytest.mark.parametrize(
    "typed",
    [
        *(
            WIDE,
            f"{WIDE} --all",
            f"{WIDE.replace('placement', 'env')} --component actor --rank 3",
            "explain",
            "recipes",
        ),
        *("explain cluster.node_groups", "explain placement-out-of-range", "--help", "validate --help"),
    ],
)
def test_nothing_is_wider_than_the_terminal(terminal: Run, typed: str) -> None:
    code, shown = terminal(*typed.split())
    assert code == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert [line for line in lines if len(line) > 80] == []
    if typed == WIDE:
        header = next(line for line in lines if line.startswith("component"))
        rows = [line for line in lines if line.startswith(("actor", "rollout", "env", "agent"))]
        nodes = [row[header.index("nodes") :].split()[0] for row in rows]
        assert nodes == ["0-7", "8-15", "16-17", "0-3"]


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
    assert "\x1b[1;31merror[" in terminal("validate", "bad.yaml")[1]
    assert "\x1b" not in terminal("validate", "bad.yaml", NO_COLOR="1")[1]
    assert "\x1b" not in terminal(*WIDE.split(), NO_COLOR="1")[1]


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
