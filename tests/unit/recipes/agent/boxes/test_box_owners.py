"""Whether boxes are gone with their owners, and say why they cannot be made."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from recipes.agent.boxes import box_limits, box_probe, starter
from recipes.agent.boxes.box import BoxError
from recipes.agent.boxes.box_limits import BoxMemory, half_of_memory
from recipes.agent.boxes.boxes import BoxHost
from rlinf_core import ConfigError
from tests.unit.recipes.agent.boxes.running import LIMITS, live, mentioning, one_box, sh, until

pytestmark = pytest.mark.security


def left_by_owner(killed: str, folder: Path, boxes: int) -> list[str]:
    """Start an owner of boxes whose commands would outlive it, end it in some way, and return what is left of mounts.

    Fails where processes or folders of the boxes are left after a while.
    """
    before = _mounts()
    command = [sys.executable, "-m", "tests.unit.recipes.agent.boxes.running", str(folder), str(boxes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        try:
            assert owner.stdout is not None
            facts = json.loads(owner.stdout.readline())
            names: list[str] = facts["names"]
            # A process that becomes another program has no command line for a moment.
            until(lambda: len(mentioning(names)) >= len(names))
            if "holder" in killed:
                for pid in facts["holders"]:
                    os.kill(pid, signal.SIGKILL)
            if "starter" in killed:
                os.kill(facts["starter"], signal.SIGKILL)
            if "owner" in killed:
                owner.send_signal(signal.SIGTERM if "term" in killed else signal.SIGKILL)
            if "interrupted" in killed:
                owner.send_signal(signal.SIGINT)
            until(lambda: not mentioning(names))
        finally:
            owner.kill()
    asyncio.run(_swept(folder))
    until(lambda: live(folder) == [])
    return sorted(_mounts() ^ before)


async def _swept(folder: Path) -> None:
    boxes = BoxHost(folder, 4096)
    await boxes.sweep()
    await boxes.close()


def _mounts() -> set[str]:
    return set(Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("killed", ["owner", "holder", pytest.param("starter and owner", marks=pytest.mark.nightly)])
def test_what_ends_a_box_leaves_nothing(killed: str, box_folder: Path) -> None:
    assert left_by_owner(killed, box_folder, 2) == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed", ["owner", "owner by term", "interrupted", "holders", "holder, starter and owner"])
def test_nothing_is_left_ten_times_of_twenty_boxes(killed: str, box_folder: Path) -> None:
    for _ in range(10):
        assert left_by_owner(killed, box_folder, 20) == []


def test_no_sweep_gets_the_lock_of_a_box_that_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def flock(descriptor: int, how: int) -> None:
        seen.append(os.listdir())
        os.close(descriptor)
        raise OSError("seen enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starter.kernel, "set_name", lambda name: None)
    monkeypatch.setattr(starter.fcntl, "flock", flock)
    with pytest.raises(OSError, match="seen enough"), socket.socket() as lease:
        starter._hold({"spec": {}, "folder": str(tmp_path / "box")}, lease, None)
    assert len(seen) == 1
    assert starter.LOCK not in seen[0]


async def test_another_starter_starts_where_one_was_killed(box_folder: Path) -> None:
    async with one_box(box_folder) as (boxes, box):
        assert boxes._starter is not None
        boxes._starter.kill()
        boxes._starter.wait()
        async with boxes.box([box_folder / "layers/host"], LIMITS) as second:
            assert [(await sh(one, "echo 1")).output for one in (box, second)] == [b"1\n"] * 2


async def test_a_request_that_cannot_be_sent_ends_no_starter(box_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with one_box(box_folder) as (boxes, _):
        before = boxes._starter
        with monkeypatch.context() as patch:
            patch.setattr("socket.send_fds", full)
            with pytest.raises(BoxError, match="Too many open files"):
                async with boxes.box([box_folder / "layers/host"], LIMITS):
                    pass
        assert boxes._starter is before


async def test_a_fork_of_the_owner_does_not_keep_its_boxes(box_folder: Path) -> None:
    async with one_box(box_folder) as (_, box):
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        try:
            async with asyncio.timeout(30):
                await box.close()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert live(box_folder) == []


async def test_a_box_that_cannot_be_made_says_why(box_folder: Path) -> None:
    with pytest.raises(BoxError, match="overlay"):
        async with one_box(box_folder, above=[box_folder / "layers/missing"]):
            pass
    assert live(box_folder) == []


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="mounts an overlay")
def test_a_machine_whose_folders_are_an_overlay_says_what_to_do(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "home"):
        (tmp_path / name).mkdir()
    mount = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    program = f"mount -t overlay overlay -o {mount} {tmp_path}/home && exec {sys.executable} -m {box_probe.__name__}"
    env = {**os.environ, "HOME": f"{tmp_path}/home"}
    done = subprocess.run(["unshare", "-m", "sh", "-c", program], env=env, capture_output=True, text=True, timeout=100)
    result = json.loads(done.stdout)
    assert result["verdict"] == "fault"
    assert "is on a file system of the kind `overlay`" in result["what"]
    assert "`agent.environment.options.box_folder`" in result["what"]


def test_a_folder_that_cannot_hold_boxes_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot hold boxes") as error:
        BoxHost(tmp_path / "file/boxes", 1024)
    assert error.value.why == "Not a directory"


async def test_a_box_may_not_need_more_than_its_node_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1025 MiB"):
        async with BoxHost(tmp_path, 1024).admission.admit(1025):
            pass


_HOLD = """
import asyncio, sys
from pathlib import Path
from recipes.agent.boxes.box_limits import BoxMemory

async def main():
    async with BoxMemory(Path(sys.argv[1]), 1000).admit(600):
        print("held", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_box_waits_for_memory_and_is_not_overtaken(tmp_path: Path) -> None:
    order: list[str] = []

    async def one(memory: BoxMemory, name: str, mib: int, held: asyncio.Event | None = None) -> None:
        async with memory.admit(mib):
            order.append(name)
            if held is not None:
                await held.wait()

    admission, release = BoxMemory(tmp_path / "memory", 1000), asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(one(admission, "first", 600, release))
        await asyncio.sleep(0)
        tasks.create_task(one(admission, "large", 900))
        await asyncio.sleep(0.05)
        tasks.create_task(one(admission, "small", 100))
        await asyncio.sleep(0.05)
        assert (order, admission.waiting) == (["first"], 2)
        release.set()
    assert admission.free() == 1000
    assert order == ["first", "large", "small"]


def test_boxes_have_half_of_what_a_container_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_limits, "allowed_bytes", lambda: 3 << 30)
    assert half_of_memory() == 1536


async def test_memory_in_pieces_is_used(tmp_path: Path) -> None:
    memory = BoxMemory(tmp_path / "memory", 100)
    async with asyncio.timeout(60), memory.admit(30):
        async with memory.admit(20):
            third = memory.admit(30)
            await third.__aenter__()
        async with memory.admit(40):
            assert memory.free() == 0
        await third.__aexit__(None, None, None)


def test_memory_in_very_many_pieces_is_counted(tmp_path: Path) -> None:
    with (tmp_path / "memory").open("w+") as other:
        for mib in range(0, 4000, 2):
            lock = struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, mib, 1, 0)
            fcntl.fcntl(other, fcntl.F_OFD_SETLK, lock)
        assert BoxMemory(tmp_path / "memory", 4000).free() == 2000


def test_memory_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert BoxMemory(path, 1000).free() == 400
    finally:
        holder.kill()
        holder.communicate()
    assert BoxMemory(path, 1000).free() == 1000


@pytest.mark.nightly
async def test_a_thousand_boxes_over_fifty_nodes_are_served_in_turn(tmp_path: Path) -> None:
    most, order = 4096, dict[int, list[int]]()
    worst = 0

    async def one(memory: BoxMemory, node: int, number: int, mib: int) -> None:
        nonlocal worst
        async with memory.admit(mib):
            order.setdefault(node, []).append(number)
            worst = max(worst, most - memory.free())
            await asyncio.sleep(0.01)

    chance = random.Random(3)
    nodes = [BoxMemory(tmp_path / str(node), most) for node in range(50)]
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        for number in range(1000):
            node = number % 50
            tasks.create_task(one(nodes[node], node, number, chance.choice((256, 512, 1024, 2048))))
    assert [node.free() for node in nodes] == [most] * 50
    assert 0 < worst <= most
    assert all(served == sorted(served) for served in order.values())
    assert sum(map(len, order.values())) == 1000
