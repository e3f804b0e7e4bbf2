"""The wheel, the source distribution and the container file, checked and used as somebody would who installs them.

`make release-check`. The steps of the container file are run in a fresh Debian, and what they leave trains.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

import pytest

from rlinf_core.version import __version__
from tests.integration.test_packaging import REPOSITORY, run, succeed

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

_PYTHONS = ("3.11", "3.12", "3.13")


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
    for name in ("hetero18", "embodied/pick-laptop"):
        succeed(binaries / "rlinf", "validate", name, cwd=empty)
    refused = run(binaries / "rlinf", "validate", "math/sums-laptop", cwd=empty)
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


_FILE = REPOSITORY / "docs/container/Containerfile"


def pip_settings() -> dict[str, str]:
    """Return the settings of this machine's pip, as variables: the image's packages come from where its own do."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    pairs = [line.partition("=") for line in listed.stdout.splitlines()]
    return {f"PIP_{key.rpartition('.')[2].upper().replace('-', '_')}": value.strip("'") for key, _, value in pairs}


class Image:
    """A folder with a system, in which the instructions of a container file are carried out."""

    def __init__(self, root: Path, context: Path) -> None:
        self.root = root
        self.context = context
        self.pip: dict[str, str] = {}
        # Where in the image a folder of this machine is seen, from which packages come.
        self.lent: dict[str, Path] = {}
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.user = "root"
        self.folder = "/"

    def carry_out(self, instruction: str, rest: str) -> None:
        """Do what one instruction says, as a builder would."""
        match instruction:
            case "FROM":
                suite = rest.rsplit(":", 1)[1].removesuffix("-slim")
                subprocess.run(["debootstrap", "--variant=minbase", suite, self.root], check=True, capture_output=True)
                for name in ("/etc/resolv.conf", "/etc/hosts"):
                    shutil.copy(name, self.root / name[1:])
                self._lend_packages()
            case "RUN":
                result = self.run(rest)
                assert result.returncode == 0, f"RUN {rest}\n{result.stdout}{result.stderr}"
            case "ENV" | "ARG":
                name, _, value = rest.partition("=")
                self.environment[name] = value
            case "WORKDIR":
                self.folder = rest
                (self.root / rest[1:]).mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, _ = rest.split()
                for path in (path for source in sources for path in glob.glob(source, root_dir=self.context)):
                    shutil.copy(self.context / path, self.root / self.folder[1:])
            case "USER":
                self.user = rest
            case "CMD":
                pass
            case _:
                raise ValueError(f"{instruction} is not known here")

    def _lend_packages(self) -> None:
        """Set the image's pip as this machine's is: files are copied, folders are lent while something runs."""
        (self.root / "run/pip").mkdir(parents=True)
        for name, value in pip_settings().items():
            words: list[str] = []
            for word in value.split():
                path = Path(word.removeprefix("file://"))
                if path.is_absolute() and path.is_file():
                    shutil.copy(path, self.root / "run/pip")
                    word = f"/run/pip/{path.name}"
                elif path.is_absolute() and path.is_dir():
                    # An index refers to files beside itself.
                    lent = f"/run/pip/{len(self.lent)}"
                    self.lent[lent] = path.parent
                    word = f"{word.removesuffix(str(path))}{lent}/{path.name}"
                words.append(word)
            self.pip[name] = " ".join(words)

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a line of shell in the system, with its own mounts, which end with it."""
        root = shlex.quote(str(self.root))
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in (self.environment | self.pip).items())
        shell = f"cd {shlex.quote(self.folder)} && {line}"
        who = "" if self.user == "root" else f"--userspec={self.user}"
        home = "/root" if self.user == "root" else f"/home/{self.user}"
        mounts = [f"mount --bind /dev {root}/dev && mount -t tmpfs tmpfs {root}/dev/shm"]
        # Read-only: what an image does must not reach this machine.
        mounts += [
            f"mkdir -p {root}{place} && mount --bind {source} {root}{place} && mount -o remount,bind,ro {root}{place}"
            for place, source in {"/sys": Path("/sys"), **self.lent}.items()
        ]
        inside = f"chroot {who} {root} env -i HOME={home} {variables} sh -c {shlex.quote(shell)}"
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={self.root / 'proc'}"]
        command += ["sh", "-c", " && ".join([*mounts, f"exec {inside}"])]
        return subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)


def instructions() -> Iterator[tuple[str, str]]:
    """Return the instructions of the container file, continued lines joined."""
    lines = [line for line in _FILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, rest = line.partition(" ")
        yield instruction, " ".join(rest.split())


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The image, built beside the wheel of this checkout."""
    context = tmp_path_factory.mktemp("context")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(context / "dist"), str(REPOSITORY)]
    subprocess.run(build, check=True, capture_output=True)
    shutil.copy(REPOSITORY / "constraints.txt", context)
    image = Image(tmp_path_factory.mktemp("image") / "root", context)
    for instruction, rest in instructions():
        image.carry_out(instruction, rest)
    return image


with_debian = [
    pytest.mark.timeout(3000),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("debootstrap") is None, reason="needs root and debootstrap for a fresh Debian"
    ),
]


class TestContainer:
    pytestmark = with_debian

    def test_who_runs_in_it_is_not_root(self, image: Image) -> None:
        assert image.run("id -un").stdout.strip() == "rlinf"

    def test_it_has_what_a_cluster_calls(self, image: Image) -> None:
        for tool in ("ray --version", "rlinf --version", "wget --version", "ssh -V"):
            assert image.run(tool).returncode == 0, tool

    def test_it_trains(self, image: Image) -> None:
        said = image.run("rlinf train recipe=embodied runner.max_steps=2")
        assert said.returncode == 0, said.stdout + said.stderr
        assert "finished" in said.stdout
