"""The wheel, installed where nothing of this checkout is in reach."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    words = [str(part) for part in command]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def succeed(*command: str | Path, cwd: Path, timeout: float = 900) -> str:
    """Run a command that must end with 0, and return its standard output."""
    result = run(*command, cwd=cwd, timeout=timeout)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a clean environment that holds the wheel and its core dependencies only."""
    folder = tmp_path_factory.mktemp("wheel")
    succeed(sys.executable, "-m", "build", "--wheel", "--outdir", folder / "dist", REPOSITORY, cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    venv.create(folder / "venv", with_pip=True)
    binaries = folder / "venv" / "bin"
    constraints = REPOSITORY / "constraints.txt"
    succeed(binaries / "pip", "install", "--quiet", "-c", constraints, wheel, cwd=folder)
    return binaries


@pytest.mark.timeout(300)
def test_a_shipped_config_validates_by_name(installed: Path, tmp_path: Path) -> None:
    printed = succeed(installed / "rlinf", "validate", "hetero18", cwd=tmp_path)
    assert printed.splitlines()[-1].startswith("hetero18: valid")


def test_the_recipes_travel_with_it(installed: Path, tmp_path: Path) -> None:
    said = succeed(installed / "rlinf", "train", cwd=tmp_path)
    assert "embodied" in said
    assert "math" in said


def test_its_name_is_no_other_projects(installed: Path, tmp_path: Path) -> None:
    listed = run(installed / "pip", "list", "--format=json", cwd=tmp_path)
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert "rlinf-cli" in names
    assert "rlinf" not in names
    assert run(installed / "rlinf", "--version", cwd=tmp_path).stdout.startswith("rlinf ")


def test_what_training_lacks_is_named_for_this_interpreter(installed: Path, tmp_path: Path) -> None:
    result = run(installed / "rlinf", "train", "recipe=embodied", cwd=tmp_path)
    assert result.returncode == 1
    # The interpreter may be called by another of its names, such as python3.11.
    assert f"run `{installed / 'python'}" in result.stderr
    assert " -m pip install 'ray>=2.54,<2.61' 'torch>=2.6' 'numpy>=1.26' 'safetensors>=0.5'`" in result.stderr
    assert "`embodied` cannot be run: needs `ray`" in run(installed / "rlinf", "train", cwd=tmp_path).stdout


def test_the_core_install_is_light(installed: Path, tmp_path: Path) -> None:
    listed = run(installed / "pip", "list", "--format=json", cwd=tmp_path)
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert "pydantic" in names
    assert not names & {"torch", "ray", "numpy"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "placement", "hetero18", "--assume", "a800=8", "--assume", "4090=8"),
        ("inspect", "config", "hetero18"),
        ("inspect", "env", "hetero18", "--component", "env", "--rank", "1", "--assume", "8"),
        ("explain", "--schema"),
        ("explain", "placement-out-of-range"),
        ("explain", "cluster.node_groups.env_configs"),
    ],
    ids=" ".join,
)
def test_commands_need_no_extras(installed: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert succeed(installed / "rlinf", *arguments, cwd=tmp_path).strip()
