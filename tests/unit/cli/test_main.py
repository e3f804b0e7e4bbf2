"""The `rlinf` command itself: how it ends, what is typed, and commands of others and of earlier names."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from rlinf_cli.command import key_values
from rlinf_cli.interrupts import ExitCode, code_of
from rlinf_core import __version__
from rlinf_core.errors import ConfigError, PlacementError, RLinfError
from rlinf_core.process import import_path
from tests.golden.frozen import DATA
from tests.unit.cli.typed import Cli

RLINF = Path(sys.executable).with_name("rlinf")


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `rlinf train` raise."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("rlinf_cli.run.starting.recipes_result", fail)


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [(), ("validate",), ("inspect",), ("inspect", "placement")])
def test_help_under_both_names(cli: Cli, command: tuple[str, ...], flag: str) -> None:
    ended = cli(*command, flag)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"Usage: rlinf {' '.join(command)}".strip())
    assert max(map(len, ended.out.splitlines())) <= 80


@pytest.mark.parametrize(
    "typed",
    [
        *("validte", "validate --nonsense a.yaml", "validate", "validate actor.seed=1", "validate - -"),
        *("validate a.yaml --output xml", "inspect env a.yaml", "runs nothing", ""),
    ],
)
def test_wrong_usage_is_2_and_said_on_stderr(cli: Cli, typed: str) -> None:
    err = cli.refuses(2, *typed.split())
    # Without what it requires, a command shows its help.
    assert err.startswith("Usage: rlinf " if typed in ("", "validate") else "error: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("typed", "neighbour"),
    [
        ("validte", "validate"),
        ("inpsect embodied/pick-laptop", "inspect"),
        ("runs prun", "prune"),
        ("robot lsit", "list"),
        ("train embodeid", "embodied"),
        ("inspect hetero8", "hetero18"),
    ],
)
def test_a_misspelt_word_gets_its_neighbour(cli: Cli, typed: str, neighbour: str) -> None:
    ended = cli(*typed.split())
    assert ended.code == 2
    assert f"did you mean `{neighbour}`?" in ended.err + ended.out


@pytest.mark.parametrize("group", [(), ("inspect",), ("runs",), ("robot",), ("venv",)], ids=" ".join)
def test_summaries_fit_a_terminal(cli: Cli, group: tuple[str, ...]) -> None:
    text = cli(*group, "--help").out
    assert "..." not in text.replace("[ARGS]...", "")
    assert max(map(len, text.splitlines())) <= 80


def test_a_recipe_is_named_bare(cli: Cli) -> None:
    assert cli("train", "embodied", "--dry-run", "-q").out == cli("train", "recipe=embodied", "--dry-run", "-q").out


def test_views_are_named_before_or_behind_the_file(cli: Cli) -> None:
    views = [("placement", "embodied/pick-laptop"), ("embodied/pick-laptop", "placement"), ("embodied/pick-laptop",)]
    assert len({cli("inspect", *words).out for words in views}) == 1
    asked = ("embodied/pick-laptop", "--component", "env", "--rank", "0")
    assert cli("inspect", *asked, "env").out == cli("inspect", "env", *asked).out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), ExitCode.INVALID),
        (PlacementError("x"), ExitCode.INVALID),
        (RLinfError("x"), ExitCode.FAILED),
    ],
)
def test_errors_have_their_codes(error: RLinfError, code: ExitCode) -> None:
    assert code_of(error) is code


def test_an_error_of_ours_is_one_block(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, RLinfError("it broke", where="node 3", why="no route", help="plug it in"))
    assert cli.fails(1, "train") == "error: it broke\n  where: node 3\n    why: no route\n     do: plug it in\n"
    assert "Traceback" in cli("train", "--verbose").err
    assert "Traceback" in cli("--verbose", "train").err
    failing(monkeypatch, KeyboardInterrupt())
    assert cli.fails(130, "train") == ""


def test_a_file_that_the_machine_refuses_is_no_bug(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, OSError(errno.EROFS, "Read-only file system", "/archive/exports"))
    lines = cli.fails(1, "train").splitlines()
    assert lines[0] == "error: a file or folder cannot be used"
    assert lines[1:3] == ["  where: /archive/exports", "    why: Read-only file system"]


def test_a_bug_is_said_in_words_without_its_locals(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyError("surprise"))
    err = cli.fails(1, "train")
    assert "this is a bug in rlinf" in err
    assert "KeyError: 'surprise'" in err
    assert "--verbose" in err
    assert "Traceback" not in err
    assert "Traceback" in cli("train", "--verbose").err


@pytest.mark.parametrize("end", ["sys.exit()", "sys.exit(0)", "sys.exit('bye')", "raise SystemExit(3)"])
def test_code_that_exits_is_no_success(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    (tmp_path / "leaves.py").write_text(f"import sys\n{end}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("rlinf_cli.run.starting.recipes_result", lambda: import_module("leaves"))
    err = cli.refuses(1, "train")
    assert "error: the command was ended by code that it ran" in err
    assert f"where: {tmp_path}/leaves.py:2 in <module>" in err


@pytest.mark.parametrize("command", ["runs", "validate embodied/pick-laptop", "init env x"])
def test_removed_working_folder_is_named(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "error: the working folder does not exist" in cli.refuses(1, *command.split())


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


@pytest.mark.parametrize(
    "command", ["rlinf train", "rlinf --help", "rlinf inspect placement embodied/libero-collocated-8gpu"]
)
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


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "rlinf_cli", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"rlinf {__version__}\n"


def test_removed_command_names_what_does_its_work(cli: Cli) -> None:
    err = cli.fails(2, "chaos", "embodied/pick-laptop")
    assert "rlinf no longer has the command `chaos`" in err
    assert "make chaos JOB=FILE" in err


FROZEN: Final = Path(__file__).with_name("typed.txt")
# Each right call answers at once, and the same on every machine: commands that train, use a policy, an arm, boxes or a
# simulator's environment are typed wrong.
TYPED: Final = (
    ("train -q", "train laptop.yml"),
    (
        "train embodied/pick-laptop actor.optim.lr=1e-4,3e-4 --dry-run",
        "train embodied/pick-laptop actor.optim.lr=1e-4,1e-4 --dry-run",
    ),
    ("validate embodied/pick-laptop", "validate embodied/pick-laptop actor.optim.lr=fast"),
    ("inspect embodied/pick-laptop", "inspect laptpo"),
    ("inspect env embodied/pick-laptop -c env -r 0 -q", "inspect embodied/pick-laptop env -c evn -r 0"),
    ("inspect memory first --available 64 -q", "inspect memory first --available none"),
    ("explain recipe", "explain unknown-kye"),
    ("explain empty-file", "explain --schema --recipe math_"),
    ("init reward mine", "init rewrad mine"),
    ("up embodied/pick-laptop --dry-run --name typed", "up embodied/pick-laptop --print slrum"),
    ("status --name nothing", "status --nmae x"),
    ("down --name nothing", "down --node-rank 1"),
    ("doctor embodied/pick-laptop actor.optim.lr=fast", "doctor"),
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
    ("serve embodied/pick-laptop", "serve serve/sums-laptp"),
    ("record embodied/pick-laptop algorithm.gamma=0.5", "record first -n none"),
    ("robot list embodied/pick-laptop", "robot list embodied/pick-laptop 1"),
    ("robot check embodied/pick-laptop", "robot check"),
    ("robot reset embodied/pick-laptop", "robot reset embodied/pik-laptop"),
    ("robot stop embodied/pick-laptop", "robot stop embodied/pick-laptop 0 1"),
    ("robot teleop embodied/pick-laptop", "robot teleop embodied/pick-laptop --device joystik"),
    ("robot cameras embodied/pick-laptop", "robot cameras embodied/pick-laptop -o"),
    ("tasks check nowhere", "tasks check . --memory 1"),
    ("tasks build nowhere", "tasks build"),
    ("tasks load nothing.tar image", "tasks load nothing.tar"),
    ("venv list --json", "venv setup laptop"),
    ("venv setup nothing --no-such", "venv list x"),
    ("venv check laptop", "venv check metaworld --starts 0"),
    ("inspect placement embodied/pick-laptop -q", "inspect placement embodied/pick-laptop --assume 8x"),
    ("inspect config first", "inspect config embodied/pick-laptop --every"),
    ("inspect env embodied/pick-laptop -c rollout -q", "inspect hardware --name nothing"),
    ("inspect hardware embodied/pick-laptop --parallel 0", "inspect hardware nothing.yaml"),
    ("runs list -q", "runs list --sort nmae"),
    ("runs convert first", "runs convert frist"),
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


def test_commands_answer_as_they_did(cli: Cli, runs: Path) -> None:
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


def test_every_command_is_typed_twice() -> None:
    page = Path(__file__).parents[3] / "docs/commands.md"
    commands = re.findall(r"^## rlinf (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    families = {command.rpartition(" ")[0] for command in commands}
    typed = [f"{line} " for pair in TYPED for line in pair]
    assert len(commands) > len(families)
    for command in set(commands) - families:
        assert sum(line.startswith(f"{command} ") for line in typed) >= 2, command


BY_TITLE = {
    "Jobs": ["train", "validate", "inspect", "explain", "init", "tasks"],
    "Machines": ["up", "status", "down", "doctor", "venv"],
    "Runs": ["ps", "logs", "stop", "runs"],
    "Results": ["why", "report", "compare"],
    "Policies": ["eval", "export", "import", "serve"],
    "Robots": ["record", "robot"],
}


def test_help_lists_every_command_under_its_heading(cli: Cli) -> None:
    sections = cli("--help").out.partition("Jobs:\n")[2].partition("\n  Examples:")[0]
    listed = [text for text in f"Jobs:\n{sections}".split("\n\n") if text]
    assert {text.partition(":")[0]: [line.split()[0] for line in text.splitlines()[1:]] for text in listed} == BY_TITLE


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs packages that offer commands."""

    def offering(**targets: str) -> None:
        points = {name: import_path.EntryPoint(name, target) for name, target in targets.items()}
        monkeypatch.setattr(import_path, "offered", lambda group: points)

    return offering


def test_package_offers_a_command(cli: Cli, offered: Callable[..., None]) -> None:
    offered(runs="tests.unit.cli.own_command:app", greet="tests.unit.cli.own_command:app")
    assert cli("greet", "you").out == "hello you\n"
    # A command of ours stays, and an earlier name of an option of ours is not one of theirs.
    assert "Usage: rlinf runs" in cli("runs", "--help").out
    assert "\nFriends:\n  greet " in cli("--help").out
    ended = cli("greet", "you", "--out", "loud")
    assert (ended.out, ended.err) == ("hello you, loud\n", "")


@pytest.mark.parametrize(
    ("name", "why"), [("gone", "AttributeError"), ("__name__", "TypeError: it is not a Typer app")]
)
def test_broken_command_does_not_hide_the_others(cli: Cli, offered: Callable[..., None], name: str, why: str) -> None:
    target = f"tests.unit.cli.own_command:{name}"
    offered(broken=target)
    assert "\nOthers:\n  broken " in cli.out("--help")
    err = cli.fails(2, "broken")
    assert f"command `broken` cannot be loaded: {why}" in err
    assert target in err


def test_a_call_imports_its_own_command_only() -> None:
    program = (
        "import sys\nfrom rlinf_cli.main import main\nmain(['explain', '--help'])\n"
        "package = 'rlinf_cli.commands.'\n"
        "print(*(name for name in sys.modules if name.startswith(package)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["rlinf_cli.commands.jobs"]


@pytest.mark.parametrize(
    ("earlier", "now", "words"),
    [
        ("recipes", "train", "`rlinf recipes` is now `rlinf train`"),
        ("recipes --output json", "train --json", "now `rlinf train`, `--output json` is now `--json`"),
        ("schema --recipe math", "explain --schema --recipe math", "now `rlinf explain --schema`"),
        ("validate math/sums-laptop -o json", "validate math/sums-laptop --json", "`-o json` is now `--json`"),
        ("validate math/sums-laptop --output=text", "validate math/sums-laptop", "`--output=text` has no effect"),
        ("validate math/sums-laptop --output github", "validate math/sums-laptop --github", "is now `--github`"),
        ("runs --log-path here", "--runs-dir here runs", "now `--runs-dir here`"),
        ("inspect placement math/sums-laptop --tree", "inspect math/sums-laptop --all", "`--tree` is now `--all`"),
        ("inspect placement math/sums-laptop --svg -", "inspect math/sums-laptop -o -", "`--svg -` is now `-o -`"),
        ("sweep math/sums-laptop actor.seed=1,2 --dry-run", "train math/sums-laptop actor.seed=1,2 --dry-run", ""),
        ("replay --json item x", "why --json --replay item x", "now `rlinf why --replay`"),
        ("samples nosuch -n 1", "report nosuch --samples -n 1", "now `rlinf report --samples`"),
        ("play nosuch", "eval --play nosuch", "`rlinf play` is now `rlinf eval --play`"),
        ("env list", "venv list", "`rlinf env` is now `rlinf venv`"),
        ("logs --component a --rank 0", "logs a :0", "`--rank 0` is now `:0`"),
    ],
)
def test_an_earlier_name_runs_and_is_told(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: str, now: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before, after = cli(*earlier.split()), cli(*now.split())
    assert (before.code, before.out) == (after.code, after.out)
    warning, _, rest = before.err.partition("\n")
    assert rest == after.err
    assert warning.startswith("warning: ")
    assert words in warning
    assert cli(*earlier.split(), "-q").err == cli(*now.split(), "-q").err


ROWS = [
    ("inspect placement embodied/pick-laptop --advise x --live", "'--live': it cannot be used with --advise"),
    ("inspect embodied/pick-laptop --advise x --all", "'--all': it cannot be used with --advise"),
    ("inspect placement embodied/pick-laptop --advise x -o a.html", "'-o': it cannot be used with --advise"),
    ("inspect placement embodied/pick-laptop --patch a.yaml", "'--patch': it goes with --advise"),
    ("inspect memory embodied/pick-laptop --available 1e308", "'--available'"),
    ("stop --timeout inf", "'--timeout': inf is not a finite number"),
    ("inspect placement embodied/pick-laptop --staleness 0", "'--staleness': it goes with --advise"),
    ("inspect placement embodied/pick-laptop --advise ,", "'--advise': name the runs"),
    ("inspect placement embodied/pick-laptop --advise x,", "'--advise': name the runs"),
    ("inspect placement embodied/pick-laptop --advise=", "'--advise': name the runs"),
    ("why --replay item --bundle a.tar.gz", "'--bundle': it cannot be used with --replay"),
    ("report --samples --text", "'--text': it cannot be used with --samples"),
    ("report --samples --watch", "'--watch': it cannot be used with --samples"),
    ("report --text -o a.html", "'-o': it cannot be used with --text"),
    ("report --step 3", "'--step': it goes with --samples"),
    ("report -n 10", "'--count': it goes with --samples"),
    ("ps --attach --stacks", "'--stacks': it cannot be used with --attach"),
    ("ps --attach --native", "'--native': it cannot be used with --attach"),
    ("eval embodied/pick-laptop --no-show", "'--show': it goes with --play"),
    ("eval embodied/pick-laptop --play --video", "'--video': it cannot be used with --play"),
    ("eval math/eval --play --allow-training-starts", "'--allow-training-starts': it cannot be used with --play"),
    ("up embodied/pick-laptop --with requeue", "'--with': it goes with --print"),
    ("up a.yaml --insecure-no-auth --token-file t", "'--token-file': it cannot be used with --insecure-no-auth"),
    ("up embodied/pick-laptop --print slurm --dry-run", "'--dry-run': it cannot be used with --print"),
    ("up embodied/pick-laptop --print slurm --node-rank 0", "'--node-rank': it cannot be used with --print"),
    ("up embodied/pick-laptop --print slurm --json", "'--json': this result has no form in JSON"),
    ("inspect placement embodied/pick-laptop -o - --json", "'--json': this result has no form in JSON"),
    ("train embodied/pick-laptop --parallel 3", "'--parallel': it goes with a sweep"),
    ("train embodied/pick-laptop --assume 8", "'--assume': a real run probes the machines"),
]


@pytest.mark.parametrize(("typed", "message"), ROWS)
def test_no_option_is_without_effect(cli: Cli, typed: str, message: str) -> None:
    assert f"invalid value for {message}" in cli.refuses(2, *typed.split())


def test_options_of_a_device_are_values_as_in_a_file() -> None:
    words = ["probability=0.2", "shortest=2", "port=/dev/ttyACM0", "smooth=true"]
    read = {"probability": 0.2, "shortest": 2, "port": "/dev/ttyACM0", "smooth": True}
    assert key_values(words) == read
    for wrong in (["probability"], ["=1"], ["port=[1"], ["port=1 #2"], ["port=1", "port=2"]):
        with pytest.raises(typer.BadParameter):
            key_values(wrong)
