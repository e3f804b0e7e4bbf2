"""Commands are imported when they are called, and none is forgotten."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint
from pkgutil import iter_modules
from typing import Any

import pytest

import rlinf_cli.commands
from rlinf_core.process import entry_points

# `import_` holds `rlinf import`: no module can be called by a word of the language.
NAMES = [
    module.name.removesuffix("_")
    for family in iter_modules(rlinf_cli.commands.__path__, "rlinf_cli.commands.")
    for module in iter_modules(import_module(family.name).__path__)
]


def test_help_lists_every_command(cli: Callable[..., Any]) -> None:
    listed = cli("--help").out.partition("Train:\n")[2].partition("\n  Examples:")[0].splitlines()
    names = [line.split()[0] for line in listed if line.startswith("  ") and line[2] != " "]
    assert sorted(names) == sorted([*NAMES, "env", "record", "robot", "samples", "serve"])


def test_help_lists_offered_commands_under_headings(cli: Callable[..., Any]) -> None:
    sections = cli("--help").out.partition("Train:\n")[2].partition("\n  Examples:")[0].split("\n\n")
    commands = {text.partition(":")[0]: [line.split()[0] for line in text.splitlines()[1:]] for text in sections}
    assert commands["Cluster"] == ["up", "status", "doctor", "down", "env"]
    assert commands["Use"] == ["eval", "play", "export", "record", "serve"]
    assert commands["Robots"] == ["robot"]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs packages that offer commands."""

    def offering(**targets: str) -> None:
        points = {name: EntryPoint(name, target, "rlinf.commands") for name, target in targets.items()}
        monkeypatch.setattr(entry_points, "offered", lambda group: points)

    return offering


def test_package_offers_a_command(cli: Callable[..., Any], offered: Callable[..., None]) -> None:
    offered(runs="tests.unit.cli.own_command:app", greet="tests.unit.cli.own_command:app")
    assert cli("greet", "you").out == "hello you\n"
    # A command of ours stays.
    assert "Usage: rlinf runs" in cli("runs", "--help").out
    assert "\nFriends:\n  greet " in cli("--help").out


def test_broken_command_does_not_hide_the_others(cli: Callable[..., Any], offered: Callable[..., None]) -> None:
    offered(broken="tests.unit.cli.own_command:gone")
    listed = cli("--help")
    assert listed.code == 0
    assert "\nOthers:\n  broken " in listed.out
    ended = cli("broken")
    assert ended.code == 2
    assert "command `broken` cannot be loaded: AttributeError" in ended.err
    assert "tests.unit.cli.own_command:gone" in ended.err


def test_a_call_imports_its_own_command_only() -> None:
    program = (
        "import sys\nfrom rlinf_cli.main import main\nmain(['schema', '--help'])\n"
        "package = 'rlinf_cli.commands.'\n"
        "print(*(name for name in sys.modules if name.startswith(package)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["rlinf_cli.commands.checking", "rlinf_cli.commands.checking.schema"]
