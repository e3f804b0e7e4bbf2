"""Earlier names of commands and options: they run, and say what they are called now."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_cli.lazy import COMMANDS
from rlinf_core.process import import_path
from tests.unit.cli.typed import Cli


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
