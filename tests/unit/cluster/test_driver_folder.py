"""Private folders of drivers: made, told apart from those left behind, and swept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_core.cluster import driver_folder as folders
from rlinf_core.errors import ClusterError
from rlinf_core.node.process_identity import ProcessIdentity, own_identity
from rlinf_core.process import proc
from tests.waiting import until


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A TMPDIR that is short enough for Ray's sockets, as that of the test itself is not."""
    # Made now: the folder that other tests' folders lie in must not be within the one that is removed here.
    tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory(prefix="rl", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def ray_processes(folder: Path) -> list[int]:
    """Return the processes of the embedded Ray of a driver's folder."""
    return proc.processes_of(str(folder), str(folder), engine_only=True)


def own_by(folder: Path, owner: ProcessIdentity) -> None:
    (folder / "owner").write_text(json.dumps(owner._asdict()))


def test_a_folder_is_its_makers_while_it_lives() -> None:
    folder = folders.new_folder()
    assert folders.is_owned(folder)
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    # Not taken away by the next driver.
    assert folders.new_folder() != folder
    assert folder.is_dir()


def test_folder_of_a_dead_process_is_removed_at_the_next_start() -> None:
    code = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]; from rlinf_core.cluster import driver_folder as folders;"
        "print(folders.new_folder())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tempfile.gettempdir()], capture_output=True, text=True, check=True
    )
    left = Path(done.stdout.strip())
    assert left.is_dir()
    assert not folders.is_owned(left)
    folders.new_folder()
    assert not left.exists()


def test_a_later_process_of_the_same_number_is_not_the_owner() -> None:
    folder = folders.new_folder()
    own_by(folder, own_identity()._replace(start=f"{os.getpid()}:1"))
    assert not folders.is_owned(folder)
    # Whoever holds the lock lives, whatever the file says.
    assert not folders.is_left_behind(folder)


@pytest.mark.parametrize("owner", ["", "5", "\xff", "1:1", "[" * 100_000, '{"pid": "x"}'])
def test_a_folder_whose_owner_cannot_be_read_stays(owner: str) -> None:
    folder = folders.new_folder()
    (folder / "owner").write_text(owner, encoding="latin-1")
    assert (folders.is_owned(folder), folders.is_left_behind(folder)) == (False, False)
    assert folders.running_jobs() == []


def test_a_driver_of_another_container_keeps_its_folder() -> None:
    other = own_identity()._replace(pid=2**22, start=f"{2**22}:1", pid_namespace=7)
    held = folders.new_folder()
    own_by(held, other)
    # It was made here, so this process holds its lock, as the other driver would.
    assert not folders.is_left_behind(held)
    left = held.parent / "left"
    left.mkdir(mode=0o700)
    own_by(left, other)
    assert folders.is_left_behind(left)
    # Of another machine nothing is known, and locks may not reach it.
    own_by(left, other._replace(boot="0", host="elsewhere"))
    assert not folders.is_left_behind(left)


def test_a_link_in_the_place_of_the_base_is_refused(temporary: Path) -> None:
    home = temporary / "home"
    home.mkdir(mode=0o700)
    (temporary / f"rlinf-{os.getuid()}").symlink_to(home)
    with pytest.raises(ClusterError, match="not a private folder"):
        folders.new_folder()


def test_a_process_that_waits_to_be_taken_note_of_is_gone() -> None:
    folder = folders.new_folder()
    process = subprocess.Popen(["true"])
    deadline = time.monotonic() + 10
    state = ""
    while state != "Z" and time.monotonic() < deadline:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        state = fields[0]
    own_by(folder, own_identity()._replace(pid=process.pid, start=f"{process.pid}:{fields[19]}"))
    assert not folders.is_owned(folder)
    process.wait()


def test_a_sweep_ends_the_engines_processes_and_no_others() -> None:
    folder = folders.new_folder()
    other = folders.new_folder()
    sleep = "import time; time.sleep(60)"

    def start(where: Path, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [name, "-c", sleep], executable=sys.executable, env={**os.environ, proc.MARK: str(where)}
        )

    ours, users, others = start(folder, "ray::WorkerProcess"), start(folder, "tensorboard"), start(other, "ray::Worker")
    try:
        proc.reap(str(folder))
        assert ours.wait(timeout=10) == -9
        assert not folder.exists()
        assert users.poll() is None
        assert others.poll() is None
        assert other.is_dir()
    finally:
        for process in (ours, users, others):
            process.kill()
            process.wait()


def test_a_folder_that_others_may_enter_is_refused(temporary: Path) -> None:
    (temporary / f"rlinf-{os.getuid()}").mkdir(mode=0o755)
    (temporary / f"rlinf-{os.getuid()}").chmod(0o755)
    with pytest.raises(ClusterError, match="not a private folder"):
        folders.new_folder()


def test_a_guardian_sweeps_when_its_driver_is_killed() -> None:
    driver = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys, time\n"
            "from rlinf_core.process import proc\nfrom rlinf_core.cluster import driver_folder as folders\n"
            "folder = folders.new_folder(); os.environ[proc.MARK] = str(folder)\n"
            "proc.guard(str(folder))\n"
            "subprocess.Popen(['ray::Agent', '-c', 'import time; time.sleep(600)'], executable=sys.executable)\n"
            "print(folder, flush=True); time.sleep(600)",
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tempfile.gettempdir())},
    )
    assert driver.stdout is not None
    folder = Path(driver.stdout.readline().strip())
    until(lambda: len(ray_processes(folder)) == 1, "the process of its Ray", seconds=60)
    driver.kill()
    driver.communicate()
    until(lambda: not folder.exists(), "the end of its folder", seconds=60)
    assert ray_processes(folder) == []


def test_unmarked_engine_process_is_known_by_its_files(tmp_path: Path) -> None:
    folder = folders.new_folder()
    environment = {name: value for name, value in os.environ.items() if name != proc.MARK}
    command = ["ray::Agent", "-c", "import time; time.sleep(600)"]
    with (folder / "agent.log").open("w") as log, (tmp_path / "other.log").open("w") as other:
        ours, foreign = (
            subprocess.Popen(command, executable=sys.executable, env=environment, stdout=file, stderr=file)
            for file in (log, other)
        )
    try:
        assert ray_processes(folder) == [ours.pid]
        proc.reap(str(folder))
        assert ours.wait(timeout=30) < 0
        assert foreign.poll() is None
    finally:
        for process in (ours, foreign):
            process.kill()
            process.wait()


def test_file_in_the_place_of_the_base_is_named(temporary: Path) -> None:
    (temporary / f"rlinf-{os.getuid()}").write_text("")
    with pytest.raises(ClusterError, match="cannot be used") as caught:
        folders.new_folder()
    assert (caught.value.why, "TMPDIR" in str(caught.value.help)) == ("File exists", True)


def test_folder_of_another_user_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = temporary / "rlinf-12345"
    base.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ClusterError, match="not a private folder of yours"):
        folders.new_folder()
