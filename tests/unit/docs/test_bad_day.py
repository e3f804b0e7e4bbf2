"""docs/bad-day.md: what its commands show is what they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rlinf_cli.main import main

PAGE = (Path(__file__).parents[3] / "docs/bad-day.md").read_text(encoding="utf-8")
FILES = re.findall(r"^```yaml file=(\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
CONSOLES = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*?)\n(.*?)(?=^\$|\Z)", re.MULTILINE | re.DOTALL)
COMMANDS = [match for text in CONSOLES for match in COMMAND.findall(text)]


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_shows_this(
    command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES:
        Path(name).write_text(text, encoding="utf-8")
    program, *arguments = shlex.split(command)
    assert program == "rlinf"
    code = main(arguments)
    printed = capsys.readouterr()
    assert f"{printed.out}{printed.err}exit code {code}\n" == shown


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 6


def test_every_named_test_is_there() -> None:
    root = Path(__file__).parents[3]
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (root / path).is_file() or (name and f"def {name}(" not in (root / path).read_text(encoding="utf-8"))
    ]

    assert len(named) >= 20
    assert missing == []
