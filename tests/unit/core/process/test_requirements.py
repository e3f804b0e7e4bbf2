"""How a missing package is named and installed."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from rlinf_core import ConfigError
from rlinf_core.process import requirements
from rlinf_core.process.requirements import absence, install_command, missing_modules, require_version

PROJECT = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_command_names_this_interpreter_and_the_packages() -> None:
    assert install_command("lerobot", "PIL") == f"{sys.executable} -m pip install lerobot 'pillow>=10'"


def test_of_another_interpreter_quoted_for_a_shell() -> None:
    command = install_command("ray", "panda_gym", python="/opt/my env/bin/python")
    assert command == "'/opt/my env/bin/python' -m pip install 'ray>=2.54,<2.61' 'panda-gym>=3.0.7,<4'"


def test_what_is_missing() -> None:
    assert missing_modules(["json", "no_such_module_at_all"]) == ["no_such_module_at_all"]


@pytest.mark.parametrize(
    ("module", "installed", "fits"),
    [
        ("transformers", "4.57.1", False),
        ("transformers", "5.2.9", False),
        ("transformers", "5.3", True),
        ("transformers", "5.23.0.dev0", True),
        ("transformers", "6.0.0", False),
        ("transformers", "10.1", False),
        ("math_verify", "0.10.0", True),
        ("math_verify", "1", False),
        ("ray", "2.60.0", True),
        ("ray", "2.61.0", False),
        ("numpy", "1.25.2", False),
        ("torch", "2.13.0+cpu", True),
        ("google.protobuf", "8.0", False),
        ("peft", "unknown", True),
    ],
)
def test_an_installed_version_out_of_range_is_missing(
    module: str, installed: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What extras ask for holds for what is there, too."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: installed)
    assert missing_modules([module]) == ([] if fits else [module])
    if fits:
        require_version(module)
        return
    said = requirements._REQUIREMENTS[module]
    assert f"this Python has {installed}, out of the range >=" in absence(module)
    with pytest.raises(ConfigError) as caught:
        require_version(module)
    assert installed in caught.value.message
    assert caught.value.message.rpartition(" ")[2] in said
    assert caught.value.help == f"run `{install_command(module)}`"


def test_the_versions_here_are_in_range() -> None:
    """Those that are installed; the rest is not asked for its version."""
    assert [name for name in requirements._REQUIREMENTS if "out of the range" in absence(name)] == []


@pytest.mark.parametrize("requirement", sorted(requirements._REQUIREMENTS.values()))
def test_the_extras_ask_for_the_same(requirement: str) -> None:
    assert requirement in {item for extra in PROJECT["optional-dependencies"].values() for item in extra}


def test_what_any_extra_asks_for_is_checked() -> None:
    extras = PROJECT["optional-dependencies"].items()
    asked = {item for name, items in extras if name not in ("dev", "docs") for item in items}
    assert {item for item in asked if not item.startswith("rlinf-cli")} <= {*requirements._REQUIREMENTS.values()}


def test_no_message_installs_by_the_name_of_another_project() -> None:
    """On PyPI `rlinf` is one of other people."""
    root = Path(__file__).parents[4]
    assert PROJECT["name"] == "rlinf-cli"
    files = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")]
    files += [path for folder in ("rlinf_core", "rlinf_cli", "recipes") for path in (root / folder).rglob("*.py")]
    assert [str(path) for path in files if "rlinf[" in path.read_text(encoding="utf-8")] == []
