"""Whether boxes of all processes of a node together get no more memory than it has, each in its turn."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.agent.boxes import admission
from recipes.agent.boxes.admission import BoxMemory, half_of_memory

_HOLD = """
import asyncio, sys
from pathlib import Path
from recipes.agent.boxes.admission import BoxMemory

async def main():
    async with BoxMemory(Path(sys.argv[1]), 1000).admit(600):
        print("held", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_box_waits_for_memory_and_is_not_overtaken(tmp_path: Path) -> None:
    order: list[str] = []

    async def one(admission: BoxMemory, name: str, mib: int, held: asyncio.Event | None = None) -> None:
        async with admission.admit(mib):
            order.append(name)
            if held is not None:
                await held.wait()

    async def run() -> int:
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
        return admission.free()

    assert asyncio.run(run()) == 1000
    assert order == ["first", "large", "small"]


def test_boxes_have_half_of_what_a_container_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "allowed_bytes", lambda: 3 << 30)
    assert half_of_memory() == 1536


def test_memory_in_pieces_is_used(tmp_path: Path) -> None:
    async def run() -> int:
        admission = BoxMemory(tmp_path / "memory", 100)
        async with asyncio.timeout(60), admission.admit(30):
            async with admission.admit(20):
                third = admission.admit(30)
                await third.__aenter__()
            async with admission.admit(40):
                left = admission.free()
            await third.__aexit__(None, None, None)
        return left

    assert asyncio.run(run()) == 0


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
def test_a_thousand_boxes_over_fifty_nodes_are_served_in_turn(tmp_path: Path) -> None:
    most, order = 4096, dict[int, list[int]]()
    worst = 0

    async def one(admission: BoxMemory, node: int, number: int, mib: int) -> None:
        nonlocal worst
        async with admission.admit(mib):
            order.setdefault(node, []).append(number)
            worst = max(worst, most - admission.free())
            await asyncio.sleep(0.01)

    async def run() -> None:
        chance = random.Random(3)
        nodes = [BoxMemory(tmp_path / str(node), most) for node in range(50)]
        async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
            for number in range(1000):
                node = number % 50
                tasks.create_task(one(nodes[node], node, number, chance.choice((256, 512, 1024, 2048))))
        assert [node.free() for node in nodes] == [most] * 50

    asyncio.run(run())
    assert 0 < worst <= most
    assert all(served == sorted(served) for served in order.values())
    assert sum(map(len, order.values())) == 1000
