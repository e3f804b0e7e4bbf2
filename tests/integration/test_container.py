"""The container file: its steps are run in a fresh Debian, and what they leave trains. Needs root and `debootstrap`."""

from __future__ import annotations

import glob
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_packaging import REPOSITORY

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("debootstrap") is None, reason="needs root and debootstrap for a fresh Debian"
    ),
]

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


def test_who_runs_in_it_is_not_root(image: Image) -> None:
    assert image.run("id -un").stdout.strip() == "rlinf"


def test_it_has_what_a_cluster_calls(image: Image) -> None:
    for tool in ("ray --version", "rlinf --version", "wget --version", "ssh -V"):
        assert image.run(tool).returncode == 0, tool


def test_it_trains(image: Image) -> None:
    said = image.run("rlinf train recipe=embodied runner.max_steps=2")
    assert said.returncode == 0, said.stdout + said.stderr
    assert "finished" in said.stdout
