"""Whether what runs in a box stays within its limits, and in it."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.agent.boxes import boxes as boxes_module
from recipes.agent.boxes.box import BoxEnded, Done, LiveBox, Written
from recipes.agent.boxes.boxes import MIB
from recipes.agent.boxes.groups import group_place
from tests.unit.recipes.agent.boxes.running import LIMITS, in_box, one_box, put, sh
from tests.unit.recipes.agent.tools.escapes import ESCAPES, program_of

pytestmark = pytest.mark.security


# What is the box's own, and what only its limits bound.
HARMLESS = {
    *("read the users", "write into /usr", "write into the interpreter", "write into the root"),
    "write a device folder",
    *("fill shared memory", "fill the disk by one file", "fill the disk by many files", "make a file of a terabyte"),
    *("find packages of this interpreter", "open a raw socket", "be told of its end instead of ended"),
    *("end all processes", "end its parent", "stop its parent", "end its parent's group"),
    *("become root", "become another user", "leave its groups", "raise its limit of memory", "raise its limit of time"),
    *("fork without end", "start threads without end", "take memory without end", "take memory by a number"),
}


def test_a_box_over_its_memory_ends_and_can_be_read(box_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes_module, "group_place", lambda: None)

    async def act(box: LiveBox) -> tuple[Any, Any]:
        await sh(box, "echo 7 > kept")
        eaters = "for n in 1 2 3 4; do python3 -c 'import time; x = bytearray(90 << 20); time.sleep(600)' & done; wait"
        with pytest.raises(BoxEnded, match="more memory than 256 MiB"):
            await sh(box, eaters)
        with pytest.raises(BoxEnded):
            await sh(box, "true")
        left = await box.finish()
        return await box.read("/app/kept"), left.peak

    assert in_box(box_folder, act)[0].data == b"7\n"


def test_one_process_gets_no_more_memory_than_its_box(box_folder: Path) -> None:
    done = in_box(box_folder, lambda box: sh(box, "python3 -c 'bytearray(300 << 20)'"))
    assert done.status != 0


def test_a_box_that_fills_the_disk_ends(box_folder: Path) -> None:
    async def act(box: LiveBox) -> None:
        with pytest.raises(BoxEnded, match="it wrote more than 64 MiB"):
            await sh(box, "for n in 1 2 3; do head -c 40000000 /dev/zero > /tmp/$n; done; sleep 600")

    in_box(box_folder, act)


def test_a_fork_bomb_and_removed_programs_leave_a_box_to_read(box_folder: Path) -> None:
    async def act(box: LiveBox) -> Written | None:
        await sh(box, "echo 7 > /app/kept")
        await sh(box, "python3 -c 'import os\nwhile True:\n  try: os.fork()\n  except OSError: pass'", timeout=0.5)
        await sh(box, "rm -rf /usr/lib /lib /lib64 /bin /usr/bin 2>/dev/null")
        assert (await sh(box, "true")).status == 126
        await box.finish()
        return await box.read("/app/kept")

    assert in_box(box_folder, act) == Written(b"7\n", late=False)


@pytest.mark.skipif(group_place() is None, reason="no control group is delegated that bounds memory")
def test_bombs_end_neither_a_box_nor_its_neighbour(box_folder: Path) -> None:
    limits = replace(LIMITS, memory=200 * MIB)
    take = "held = []\nwhile True: held.append(bytearray(b'x' * (4 << 20)))"
    fork = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"

    async def act() -> tuple[Done, Done, Any]:
        async with (
            one_box(box_folder, limits) as (boxes, box),
            boxes.box([box_folder / "layers/host"], limits) as beside,
        ):
            await box.run(["python3", "-c", take], timeout=60)
            alive = await sh(box, "echo 7 > /app/kept; cat /app/kept")
            await box.run(["python3", "-c", fork], timeout=0.5)
            await sh(box, "rm -rf --no-preserve-root / 2>/dev/null")
            return alive, await sh(beside, "ls /usr/bin | head -n1; echo 8"), await box.finish(["/app"])

    alive, beside, left = asyncio.run(act())
    assert (alive.output, beside.status) == (b"7\n", 0)
    assert beside.output.endswith(b"8\n")
    assert 150 * MIB < left.peak <= 210 * MIB


def test_nothing_gets_out_of_a_box(box_folder: Path, host: dict[str, Any]) -> None:
    facts = json.dumps(host)
    tried = {name: program_of(attempt, facts) for name, attempt in ESCAPES.items() if name not in HARMLESS}
    assert len(tried) >= 40
    runner = (
        "import ctypes, json, os, resource, signal, socket, struct, subprocess, sys, threading, time\n"
        "for name, program in json.load(open('/app/tried')).items():\n"
        "    print(name, end=': ', flush=True)\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        exec(compile(program, 'program', 'exec'), {})\n"
        "        os._exit(0)\n"
        "    if os.waitpid(pid, 0)[1]:\n"
        "        print('held by the kernel', flush=True)\n"
    )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in (("tried", json.dumps(tried)), ("runner.py", runner)):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))

    async def act(box: LiveBox) -> Done:
        await put(box, buffer.getvalue(), "/app")
        return await box.run(["python3", "/app/runner.py"], timeout=60)

    lines = dict(line.split(": ", 1) for line in in_box(box_folder, act).output.decode().splitlines() if ": " in line)
    assert {name: said for name, said in lines.items() if not said.startswith("held")} == {}
    assert set(lines) == set(tried)


def test_a_box_sees_no_network_and_no_process_but_its_own(box_folder: Path) -> None:
    script = "cat /proc/net/dev | wc -l; ls -d /proc/[0-9]* | wc -l; cat /proc/1/comm; test -d /sys/class || echo none"
    done = in_box(box_folder, lambda box: sh(box, script))
    # Two lines of headings and the loopback; init, the shell, `ls` and `wc`.
    assert done.output == b"3\n4\nrlinf-box-init\nnone\n"
