"""The `rlinf` command itself: how it ends, and what is typed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from rlinf_cli.exit_codes import ExitCode, code_of
from rlinf_core.errors import ChannelClosed, ConfigError, PlacementError, RLinfError
from tests.golden.frozen import DATA

RLINF = Path(sys.executable).with_name("rlinf")


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `rlinf train` raise."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("rlinf_cli.run.starting.recipes_result", fail)


def test_the_version(cli: Callable[..., Any]) -> None:
    from rlinf_core import __version__

    ended = cli("--version")
    assert (ended.code, ended.out) == (0, f"rlinf {__version__}\n")


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [(), ("validate",), ("inspect",), ("inspect", "placement")])
def test_help_under_both_names(cli: Callable[..., Any], command: tuple[str, ...], flag: str) -> None:
    ended = cli(*command, flag)
    assert ended.code == 0
    assert ended.out.startswith(f"Usage: rlinf {' '.join(command)}".strip())
    assert max(map(len, ended.out.splitlines())) <= 80
    assert ended.err == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("validte",),
        ("validate", "--nonsense", "a.yaml"),
        ("validate",),
        ("validate", "actor.seed=1"),
        ("validate", "-", "-"),
        ("validate", "a.yaml", "--output", "xml"),
        ("inspect", "env", "a.yaml"),
        ("runs", "nothing"),
        (),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2_and_said_on_stderr(cli: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    ended = cli(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    # Without what it requires, a command shows its help.
    assert ended.err.startswith("Usage: rlinf " if arguments in ((), ("validate",)) else "error: ")
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("arguments", "neighbour"),
    [
        (("validte",), "validate"),
        (("inpsect", "laptop"), "inspect"),
        (("runs", "prun"), "prune"),
        (("robot", "lsit"), "list"),
        (("validate", "laptpo"), "laptop"),
        (("train", "laptop.yml"), "laptop"),
        (("train", "embodeid"), "embodied"),
        (("inspect", "hetero8"), "hetero18"),
    ],
    ids=" ".join,
)
def test_a_misspelt_word_gets_its_neighbour(
    cli: Callable[..., Any], arguments: tuple[str, ...], neighbour: str
) -> None:
    ended = cli(*arguments)
    assert ended.code == 2
    assert f"did you mean `{neighbour}`?" in ended.err + ended.out


@pytest.mark.parametrize("group", [(), ("inspect",), ("runs",), ("robot",), ("venv",)], ids=" ".join)
def test_summaries_fit_a_terminal(cli: Callable[..., Any], group: tuple[str, ...]) -> None:
    text = cli(*group, "--help").out
    assert "..." not in text.replace("[ARGS]...", "")
    assert max(map(len, text.splitlines())) <= 80


def test_a_recipe_is_named_bare(cli: Callable[..., Any]) -> None:
    assert cli("train", "embodied", "--dry-run", "-q").out == cli("train", "recipe=embodied", "--dry-run", "-q").out


def test_views_are_named_before_or_behind_the_file(cli: Callable[..., Any]) -> None:
    views = [("placement", "laptop"), ("laptop", "placement"), ("laptop",)]
    assert len({cli("inspect", *words).out for words in views}) == 1
    asked = ("laptop", "--component", "env", "--rank", "0")
    assert cli("inspect", *asked, "env").out == cli("inspect", "env", *asked).out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), ExitCode.INVALID),
        (PlacementError("x"), ExitCode.INVALID),
        (ChannelClosed("c", "x"), ExitCode.FAILED),
        (RLinfError("x"), ExitCode.FAILED),
    ],
)
def test_errors_have_their_codes(error: RLinfError, code: ExitCode) -> None:
    assert code_of(error) is code


def test_an_error_of_ours_is_one_block(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, RLinfError("it broke", where="node 3", why="no route", help="plug it in"))
    assert cli.fails(1, "train") == "error: it broke\n  where: node 3\n    why: no route\n     do: plug it in\n"


def test_an_error_of_ours_has_its_traceback_under_verbose(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, RLinfError("it broke"))
    assert "Traceback" in cli("train", "--verbose").err
    assert "Traceback" in cli("--verbose", "train").err
    assert "Traceback" not in cli("train").err


def test_a_bug_is_said_in_words_without_its_locals(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyError("surprise"))
    err = cli.fails(1, "train")
    assert "this is a bug in rlinf" in err
    assert "KeyError: 'surprise'" in err
    assert "--verbose" in err
    assert "Traceback" not in err
    assert "Traceback" in cli("train", "--verbose").err


def test_an_interrupt_is_130(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    ended = cli("train")
    assert (ended.code, ended.err) == (130, "")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_waiting_command_quietly(sent: signal.Signals, code: int) -> None:
    """It waits for the end of standard input, which never comes: only the signal can end it."""
    with subprocess.Popen(
        [RLINF, "validate", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        # Larger than any pipe's buffer: when this returns, the command has begun to read.
        process.stdin.write(b"# filler\n" * 20_000)
        process.stdin.flush()
        # A signal between two reads is seen by Python only after the second; another one wakes it from there.
        for _ in range(40):
            process.send_signal(sent)
            try:
                process.wait(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                continue
        assert process.returncode == code
        assert process.stdout.read() == b""
        assert process.stderr.read() == b""


def shell(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PATH=f"{RLINF.parent}{os.pathsep}{os.environ['PATH']}")
    return subprocess.run(
        ["bash", "-c", script], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "command",
    ["rlinf --help", "rlinf explain", "rlinf explain --schema", "rlinf validate --help", "rlinf train"],
)
def test_a_reader_that_leaves_early_sees_no_traceback(command: str, tmp_path: Path) -> None:
    ended = shell(f"{command} | head -1", tmp_path)
    assert ended.returncode == 0
    assert len(ended.stdout.splitlines()) == 1
    assert "Traceback" not in ended.stderr
    assert "BrokenPipe" not in ended.stderr


def test_early_reader_exit_keeps_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("cluster:\n  num_nodes: 0\n" + "".join(f"  key{i}: 1\n" for i in range(2000)))
    ended = shell('rlinf validate bad.yaml 2>/dev/null | true; echo "${PIPESTATUS[0]}"', tmp_path)
    assert ended.stdout == "2\n"


@pytest.mark.parametrize("command", ["rlinf train", "rlinf --help", "rlinf inspect placement collocated"])
def test_a_full_disk_is_said_in_words(command: str, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    ended = shell(f"{command} >/dev/full", tmp_path)
    assert ended.returncode == 1
    assert ended.stderr == "error: the output cannot be written\n    why: No space left on device\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("file", "code"), [("hetero18", 0), ("-", 2)])
def test_closed_streams_change_no_exit_code(closed: str, file: str, code: int, tmp_path: Path) -> None:
    ended = shell(f"rlinf validate {file} {closed}", tmp_path)
    assert ended.returncode == code
    assert "bug" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_no_character_set_is_too_small(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("cluster:\n  名: 1\n", encoding="utf-8")
    ended = shell("PYTHONIOENCODING=ascii rlinf validate a.yaml", tmp_path)
    assert ended.returncode == 2
    assert "\\u540d" in ended.stdout


def test_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "rlinf_cli", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("rlinf ")


def test_removed_command_names_what_does_its_work(cli: Callable[..., Any]) -> None:
    err = cli.fails(2, "chaos", "laptop")
    assert "rlinf no longer has the command `chaos`" in err
    assert "make chaos JOB=FILE" in err


FROZEN: Final = Path(__file__).with_name("typed.txt")
# Each right call answers at once, and the same on every machine: commands that train, or use a policy, are typed wrong.
TYPED: Final = (
    ("train -q", "train laptop.yml"),
    ("train laptop actor.optim.lr=1e-4,3e-4 --dry-run", "train laptop actor.optim.lr=1e-4,1e-4 --dry-run"),
    ("validate laptop", "validate laptop actor.optim.lr=fast"),
    ("inspect laptop", "inspect laptpo"),
    ("inspect env laptop -c env -r 0 -q", "inspect laptop env -c evn -r 0"),
    ("inspect memory first --available 64 -q", "inspect memory first --available none"),
    ("explain recipe", "explain unknown-kye"),
    ("explain empty-file", "explain --schema --recipe math_"),
    ("init reward mine", "init rewrad mine"),
    ("up laptop --dry-run --name typed", "up laptop --print slrum"),
    ("status --name nothing", "status --nmae x"),
    ("down --name nothing", "down --node-rank 1"),
    ("doctor laptop actor.optim.lr=fast", "doctor"),
    ("ps longer", "ps longr"),
    ("logs first driver -n 2", "logs first actr"),
    ("logs :0 -n 1", "logs :7"),
    ("stop first", "stop frist"),
    ("runs --sort name -q", "runs prnue"),
    ("runs prune longer", "runs prune --older-than 7"),
    ("why longer", "why --replay episode-1 first"),
    ("report longer --text", "report first longer --text"),
    ("report first --samples", "report first -n 3 --smaples"),
    ("compare first longer", "compare first"),
    ("eval first --play -n 40", "eval first algorithm.gamma=0.5"),
    ("export first --checkpoint 3", "export first --format onxn"),
    ("import nothing.yaml", "import laptop.yaml x.yaml"),
    ("serve laptop", "serve serve_laptp"),
    ("record laptop algorithm.gamma=0.5", "record first -n none"),
    ("robot list laptop", "robot list laptop 1"),
    ("venv list --json", "venv setup laptop"),
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and working folder with two runs in `runs`, as its only content."""
    shutil.copytree(DATA, tmp_path / "runs")
    for file in (tmp_path / "runs").glob("*/run.json"):
        # Ages of one digit, in the order of before: the column is as wide as the longest.
        state = file.read_text()
        created = json.loads(state)["created"]
        file.write_text(state.replace(str(created), f"{time.time() - 5 * 3600 + created % 3600:.7f}"))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("RLINF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_commands_answer_as_they_did(cli: Callable[..., Any], runs: Path) -> None:
    blocks: list[str] = []
    for line in (line for pair in TYPED for line in pair):
        ended = cli(*line.split())
        assert "Traceback" not in ended.err
        assert "this is a bug" not in ended.err
        text = "".join((f"$ rlinf {line}\n", ended.out, ended.err, f"[exit {int(ended.code)}]\n"))
        text = text.replace(f"{runs}/", "").replace(str(runs), "~").replace(f"{Path(__file__).parents[3]}/", "")
        text = text.replace(f"bin/{Path(sys.executable).name}", "bin/python")
        blocks.append(re.sub(r"\d+(\.\d+)? (s|min|h|d)\b", "N \\2", text))
    answers = "\n".join(blocks)
    if os.environ.get("REWRITE_FROZEN") == "1":
        FROZEN.write_text(answers, encoding="utf-8")
    assert answers == FROZEN.read_text(encoding="utf-8")
