"""Commands are imported when they are called, and none is forgotten."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rlinf_core.process import import_path

COMMANDS = {
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
    assert {text.partition(":")[0]: [line.split()[0] for line in text.splitlines()[1:]] for text in listed} == COMMANDS


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
