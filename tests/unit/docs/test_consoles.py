"""What the consoles of pages show is what their commands print; and the deaths that a page lists have tests."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rlinf_cli.main import main

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("troubleshooting.md", "placement.md")
COMMAND = re.compile(r"^\$ (.*?)\n(.*?)(?=^\$|\Z)", re.MULTILINE | re.DOTALL)


def blocks(page: str, kind: str) -> list[tuple[str, str]]:
    """Return the blocks of a page of this kind, each with what stands beside the kind."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


COMMANDS = [
    (page, command, shown)
    for page in PAGES
    for _, text in blocks(page, "console")
    for command, shown in COMMAND.findall(text)
]


@pytest.mark.parametrize(("page", "command", "shown"), COMMANDS, ids=[command for _, command, _ in COMMANDS])
def test_a_command_shows_this(
    page: str,
    command: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, text in blocks(page, "yaml"):
        if file:
            Path(file.removeprefix(" file=")).write_text(text, encoding="utf-8")
    program, *arguments = shlex.split(command)
    assert program == "rlinf"
    code = main(arguments)
    printed = capsys.readouterr()
    assert f"{printed.out}{printed.err}exit code {code}\n" == shown


def test_there_are_commands() -> None:
    assert {page for page, _, _ in COMMANDS} == set(PAGES)
    assert len(COMMANDS) >= 8


def test_every_named_test_is_there() -> None:
    root = DOCS.parent
    deaths = (DOCS / "dev/deaths.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", deaths)
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (root / path).is_file() or (name and f"def {name}(" not in (root / path).read_text(encoding="utf-8"))
    ]

    assert len(named) >= 20
    assert missing == []
