"""The wheel and the source distribution, checked and used as somebody would who installs them. `make release-check`."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from rlinf_core.version import __version__
from tests.integration.test_packaging import REPOSITORY, run

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

_PYTHONS = ("3.11", "3.12", "3.13")


def succeed(*command: str | Path, cwd: Path, timeout: float = 900) -> str:
    """Run a command that must end with 0, and return its standard output."""
    result = run(*command, cwd=cwd, timeout=timeout)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


def interpreter(version: str) -> Path:
    """Return a Python of this version, or skip."""
    asked = "import sys; print('%d.%d' % sys.version_info[:2])"
    named = shutil.which(f"python{version}")
    result = [Path(named)] if named else []
    for kept in (f".pyenv/versions/{version}.*", f".local/share/uv/python/*-{version}.*"):
        result += sorted(Path.home().glob(f"{kept}/bin/python"))
    for path in result:
        # A name on PATH may be a script that finds no such version.
        if run(path, "-c", asked, cwd=Path.home()).stdout.strip() == version:
            return path
    pytest.skip(f"there is no Python {version} here")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both distributions."""
    folder = tmp_path_factory.mktemp("dist")
    succeed(sys.executable, "-m", "build", "--outdir", folder, REPOSITORY, cwd=folder)
    return folder


def _wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def test_both_pass_the_check_of_the_package_index(dist: Path) -> None:
    assert "PASSED" in succeed(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()), cwd=dist)


def test_the_version_is_one_and_the_changelog_tells_of_it(dist: Path) -> None:
    with zipfile.ZipFile(_wheel(dist)) as wheel:
        (name,) = [item for item in wheel.namelist() if item.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(wheel.read(name))
    assert metadata["Version"] == __version__
    released = re.findall(r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    assert released[0] == __version__


def test_the_wheel_has_what_runs_and_no_more(dist: Path) -> None:
    with zipfile.ZipFile(_wheel(dist)) as wheel:
        tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"rlinf_cli", "rlinf_core", "recipes", "configs", f"rlinf_cli-{__version__}.dist-info"}


def test_the_source_distribution_has_what_tests_and_docs_need(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {
        "tests",
        "docs",
        "examples",
        "benchmarks",
        "CITATION.cff",
        "Makefile",
        "constraints.txt",
        "CHANGELOG.md",
        "LICENSE",
    } <= tops


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
@pytest.mark.parametrize("version", _PYTHONS)
def test_it_is_used_from_an_empty_folder(dist: Path, tmp_path: Path, version: str, kind: str) -> None:
    (package,) = dist.glob(kind)
    succeed(interpreter(version), "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    binaries, empty = tmp_path / "venv/bin", tmp_path / "empty"
    empty.mkdir()
    succeed(binaries / "pip", "install", "--quiet", package, cwd=empty)
    assert succeed(binaries / "rlinf", "--version", cwd=empty).split()[1] == __version__
    assert "franka" in succeed(
        binaries / "rlinf", "inspect", "placement", "hetero18", "--assume", "a800=8", "--assume", "4090=8", cwd=empty
    )
    for name in ("hetero18", "laptop"):
        succeed(binaries / "rlinf", "validate", name, cwd=empty)
    refused = run(binaries / "rlinf", "validate", "math_laptop", cwd=empty)
    assert refused.returncode == 2
    assert " -m pip install 'transformers" in refused.stdout
    assert run(binaries / "rlinf", "validate", "no_such_file.yaml", cwd=empty).returncode == 2
    assert list(empty.iterdir()) == []


def test_it_trains_from_an_empty_folder(dist: Path, tmp_path: Path) -> None:
    succeed(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    binaries, empty = tmp_path / "venv/bin", tmp_path / "empty"
    empty.mkdir()
    pip = (binaries / "pip", "install", "--quiet", "-c", REPOSITORY / "constraints.txt")
    succeed(*pip, "torch", cwd=empty)
    succeed(*pip, f"{_wheel(dist)}[train,language]", "gymnasium", cwd=empty)
    for recipe in ("embodied", "math"):
        said = succeed(binaries / "rlinf", "train", f"recipe={recipe}", "runner.max_steps=2", cwd=empty)
        assert "finished" in said
    assert len(list((empty / "runs").iterdir())) == 2
