"""Commands are imported when called, also by earlier names; options without effect are refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.lazy import COMMANDS
from rlinf_core.process import import_path
from tests.unit.cli.typed import Cli

BY_TITLE = {
    "Jobs": ["train", "validate", "inspect", "explain", "init", "tasks"],
    "Machines": ["up", "status", "down", "doctor", "venv"],
    "Runs": ["ps", "logs", "stop", "runs"],
    "Results": ["why", "report", "compare"],
    "Policies": ["eval", "export", "import", "serve"],
    "Robots": ["record", "robot"],
}


def test_help_lists_every_command_under_its_heading(cli: Callable[..., Any]) -> None:
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


def test_package_offers_a_command(cli: Callable[..., Any], offered: Callable[..., None]) -> None:
    offered(runs="tests.unit.cli.own_command:app", greet="tests.unit.cli.own_command:app")
    assert cli("greet", "you").out == "hello you\n"
    # A command of ours stays.
    assert "Usage: rlinf runs" in cli("runs", "--help").out
    assert "\nFriends:\n  greet " in cli("--help").out


def test_broken_command_does_not_hide_the_others(cli: Callable[..., Any], offered: Callable[..., None]) -> None:
    offered(broken="tests.unit.cli.own_command:gone")
    assert "\nOthers:\n  broken " in cli.out("--help")
    err = cli.fails(2, "broken")
    assert "command `broken` cannot be loaded: AttributeError" in err
    assert "tests.unit.cli.own_command:gone" in err


def test_what_is_no_app_is_a_broken_command(cli: Callable[..., Any], offered: Callable[..., None]) -> None:
    offered(odd="tests.unit.cli.own_command:__name__")
    assert "\nOthers:\n  odd " in cli("--help").out
    assert "command `odd` cannot be loaded: TypeError: it is not a Typer app" in cli("odd").err


def test_a_call_imports_its_own_command_only() -> None:
    program = (
        "import sys\nfrom rlinf_cli.main import main\nmain(['explain', '--help'])\n"
        "package = 'rlinf_cli.commands.'\n"
        "print(*(name for name in sys.modules if name.startswith(package)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["rlinf_cli.commands.check"]


@pytest.mark.parametrize(
    ("earlier", "now", "words"),
    [
        (("recipes",), ("train",), "`rlinf recipes` is now `rlinf train`"),
        (("recipes", "--output", "json"), ("train", "--json"), "now `rlinf train`, `--output json` is now `--json`"),
        (("schema", "--recipe", "math"), ("explain", "--schema", "--recipe", "math"), "now `rlinf explain --schema`"),
        (("validate", "laptop", "-o", "json"), ("validate", "laptop", "--json"), "`-o json` is now `--json`"),
        (("validate", "laptop", "--output=text"), ("validate", "laptop"), "`--output=text` has no effect"),
        (("validate", "laptop", "--output", "github"), ("validate", "laptop", "--github"), "is now `--github`"),
        (("runs", "--log-path", "here"), ("--runs-dir", "here", "runs"), "now `--runs-dir here`"),
        (("inspect", "placement", "laptop", "--tree"), ("inspect", "laptop", "--all"), "`--tree` is now `--all`"),
        (("inspect", "placement", "laptop", "--svg", "-"), ("inspect", "laptop", "-o", "-"), "`--svg -` is now `-o -`"),
        (("sweep", "laptop", "actor.seed=1,2", "--dry-run"), ("train", "laptop", "actor.seed=1,2", "--dry-run"), ""),
        (("replay", "--json", "item", "x"), ("why", "--json", "--replay", "item", "x"), "now `rlinf why --replay`"),
        (
            ("samples", "nosuch", "-n", "1"),
            ("report", "nosuch", "--samples", "-n", "1"),
            "now `rlinf report --samples`",
        ),
        (("play", "nosuch"), ("eval", "--play", "nosuch"), "`rlinf play` is now `rlinf eval --play`"),
        (("env", "list"), ("venv", "list"), "`rlinf env` is now `rlinf venv`"),
        (("logs", "--component", "a", "--rank", "0"), ("logs", "a", ":0"), "`--rank 0` is now `:0`"),
    ],
)
def test_an_earlier_name_runs_and_is_told(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    earlier: tuple[str, ...],
    now: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before, after = cli(*earlier), cli(*now)
    assert (before.code, before.out) == (after.code, after.out)
    warning, _, rest = before.err.partition("\n")
    assert rest == after.err
    assert warning.startswith("warning: ")
    assert words in warning
    assert cli(*earlier, "-q").err == cli(*now, "-q").err


def test_an_option_of_a_packages_own_command_keeps_its_name(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    point = import_path.EntryPoint("greet", "tests.unit.cli.own_command:app")
    monkeypatch.setattr(import_path, "offered", lambda _: {"greet": point})
    ended = cli("greet", "you", "--out", "loud")
    assert (ended.out, ended.err) == ("hello you, loud\n", "")


def test_help_shows_no_earlier_name(cli: Cli) -> None:
    listed = [line.split()[0] for line in cli("--help").out.splitlines() if line.startswith("  ") and line[2] != " "]
    assert not {row.old for row in COMMANDS} & set(listed)


ROWS = [
    ("inspect placement laptop --advise x --live", "'--live': it cannot be used with --advise"),
    ("inspect laptop --advise x --all", "'--all': it cannot be used with --advise"),
    ("inspect placement laptop --advise x -o a.html", "'-o': it cannot be used with --advise"),
    ("inspect placement laptop --patch a.yaml", "'--patch': it goes with --advise"),
    ("inspect placement laptop --staleness 0", "'--staleness': it goes with --advise"),
    ("inspect placement laptop --advise ,", "'--advise': name the runs"),
    ("inspect placement laptop --advise x,", "'--advise': name the runs"),
    ("inspect placement laptop --advise=", "'--advise': name the runs"),
    ("why --replay item --bundle a.tar.gz", "'--bundle': it cannot be used with --replay"),
    ("report --samples --text", "'--text': it cannot be used with --samples"),
    ("report --samples --watch", "'--watch': it cannot be used with --samples"),
    ("report --text -o a.html", "'-o': it cannot be used with --text"),
    ("report --step 3", "'--step': it goes with --samples"),
    ("report -n 10", "'--count': it goes with --samples"),
    ("ps --attach --stacks", "'--stacks': it cannot be used with --attach"),
    ("ps --attach --native", "'--native': it cannot be used with --attach"),
    ("eval laptop --no-show", "'--show': it goes with --play"),
    ("eval laptop --play --video", "'--video': it cannot be used with --play"),
    ("eval laptop --play --allow-training-starts", "'--allow-training-starts': it cannot be used with --play"),
    ("up laptop --with requeue", "'--with': it goes with --print"),
    ("up laptop --print slurm --dry-run", "'--dry-run': it cannot be used with --print"),
    ("up laptop --print slurm --node-rank 0", "'--node-rank': it cannot be used with --print"),
    ("train laptop --parallel 3", "'--parallel': it goes with a sweep"),
    ("train laptop --assume 8", "'--assume': a real run probes the machines"),
]


@pytest.mark.parametrize(("typed", "message"), ROWS)
def test_no_option_is_without_effect(cli: Cli, typed: str, message: str) -> None:
    assert f"invalid value for {message}" in cli.refuses(2, *typed.split())
