"""How a missing package is named and installed."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from rlinf_core.process import requirements
from rlinf_core.process.requirements import install_command, missing_modules

PROJECT = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_command_names_this_interpreter_and_the_packages() -> None:
    assert install_command("wandb", "torch") == f"{sys.executable} -m pip install wandb torch"


def test_of_another_interpreter_quoted_for_a_shell() -> None:
    command = install_command("ray", "panda_gym", python="/opt/my env/bin/python")
    assert command == "'/opt/my env/bin/python' -m pip install 'ray>=2.60,<2.61' 'panda-gym>=3.0.7,<4'"


def test_what_is_missing() -> None:
    assert missing_modules(["json", "no_such_module_at_all"]) == ["no_such_module_at_all"]


@pytest.mark.parametrize("requirement", sorted(requirements._REQUIREMENTS.values()))
def test_the_extras_ask_for_the_same(requirement: str) -> None:
    assert requirement in {item for extra in PROJECT["optional-dependencies"].values() for item in extra}


def test_no_message_installs_by_the_name_of_another_project() -> None:
    """On PyPI `rlinf` is one of other people."""
    root = Path(__file__).parents[4]
    assert PROJECT["name"] == "rlinf-cli"
    files = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")]
    files += [path for folder in ("rlinf_core", "rlinf_cli", "recipes") for path in (root / folder).rglob("*.py")]
    assert [str(path) for path in files if "rlinf[" in path.read_text(encoding="utf-8")] == []
