"""Whether what runs in a box stays within its limits, and in it."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.agent.boxes import boxes as boxes_module
from recipes.agent.boxes.box import BoxEnded, Written
from recipes.agent.boxes.box_limits import group_place
from recipes.agent.boxes.boxes import MIB
from recipes.language.sandbox import program_limits
from tests.unit.recipes.agent.boxes.running import LIMITS, archive_of, one_box, put, sh
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


async def test_a_box_over_its_memory_ends_and_can_be_read(box_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes_module, "group_place", lambda: None)
    eaters = "for n in 1 2 3 4; do python3 -c 'import time; x = bytearray(90 << 20); time.sleep(600)' & done; wait"
    async with one_box(box_folder) as (_, box):
        await sh(box, "echo 7 > kept")
        with pytest.raises(BoxEnded, match="more memory than 256 MiB"):
            await sh(box, eaters)
        with pytest.raises(BoxEnded):
            await sh(box, "true")
        await box.finish()
        kept = await box.read("/app/kept")
    assert kept is not None
    assert kept.data == b"7\n"


async def test_one_process_gets_no_more_memory_than_its_box(box_folder: Path) -> None:
    async with one_box(box_folder) as (_, box):
        assert (await sh(box, "python3 -c 'bytearray(300 << 20)'")).status != 0


async def test_a_fork_bomb_and_removed_programs_leave_a_box_to_read(box_folder: Path) -> None:
    async with one_box(box_folder) as (_, box):
        await sh(box, "echo 7 > /app/kept")
        await sh(box, "python3 -c 'import os\nwhile True:\n  try: os.fork()\n  except OSError: pass'", timeout=0.5)
        await sh(box, "rm -rf /usr/lib /lib /lib64 /bin /usr/bin 2>/dev/null")
        assert (await sh(box, "true")).status == 126
        await box.finish()
        assert await box.read("/app/kept") == Written(b"7\n", late=False)


@pytest.mark.skipif(group_place() is None, reason="no control group is delegated that bounds memory")
async def test_bombs_end_neither_a_box_nor_its_neighbour(box_folder: Path) -> None:
    limits = replace(LIMITS, memory=200 * MIB)
    take = "held = []\nwhile True: held.append(bytearray(b'x' * (4 << 20)))"
    fork = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    async with one_box(box_folder, limits) as (boxes, box), boxes.box([box_folder / "layers/host"], limits) as beside:
        await box.run(["python3", "-c", take], timeout=60)
        assert (await sh(box, "echo 7 > /app/kept; cat /app/kept")).output == b"7\n"
        await box.run(["python3", "-c", fork], timeout=0.5)
        await sh(box, "rm -rf --no-preserve-root / 2>/dev/null")
        there = await sh(beside, "ls /usr/bin | head -n1; echo 8")
        left = await box.finish(["/app"])
    assert there.status == 0
    assert there.output.endswith(b"8\n")
    assert 150 * MIB < left.peak <= 210 * MIB


async def test_nothing_gets_out_of_a_box(box_folder: Path, host: dict[str, Any]) -> None:
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
    packed = archive_of(("tried", "file", json.dumps(tried)), ("runner.py", "file", runner))

    async with one_box(box_folder) as (_, box):
        await put(box, packed, "/app")
        done = await box.run(["python3", "/app/runner.py"], timeout=60)
    lines = dict(line.split(": ", 1) for line in done.output.decode().splitlines() if ": " in line)
    assert {name: said for name, said in lines.items() if not said.startswith("held")} == {}
    assert set(lines) == set(tried)


async def test_a_box_sees_no_network_and_no_process_but_its_own(box_folder: Path) -> None:
    script = "cat /proc/net/dev | wc -l; ls -d /proc/[0-9]* | wc -l; cat /proc/1/comm; test -d /sys/class || echo none"
    async with one_box(box_folder) as (_, box):
        done = await sh(box, script)
    # Two lines of headings and the loopback; init, the shell, `ls` and `wc`.
    assert done.output == b"3\n4\nrlinf-box-init\nnone\n"


ALLOWED, REFUSED, NO_FAMILY, ENDED = 0x7FFF0000, 0x00050001, 0x00050061, 0x80000000
X86_64, AARCH64, I386, ARM = 0xC000003E, 0xC00000B7, 0x40000003, 0x40000028
# socket, socketpair, read, bpf, io_uring_setup
CALLS = {"x86_64": (41, 53, 0, 321, 425), "aarch64": (198, 199, 63, 280, 425)}
NUMBERS = {"x86_64": X86_64, "aarch64": AARCH64}


def verdict(machine: str, architecture: int, call: int, argument: int = 0) -> int:
    """Return what a filter says of a call."""
    data = struct.pack("=IIQQ", call, architecture, 0, argument)
    program = program_limits.call_filter(machine)
    assert program is not None
    steps = list(struct.iter_unpack("=HBBI", program))
    at = value = 0
    while True:
        operation, right, wrong, operand = steps[at]
        at += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif operation == 0x15:
            at += right if value == operand else wrong
        elif operation == 0x35:
            at += right if value >= operand else wrong
        else:
            assert operation == 0x06
            return operand


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_only_sockets_that_a_namespace_holds_are_made(machine: str) -> None:
    for call in CALLS[machine][:2]:
        allowed = {family for family in range(256) if verdict(machine, NUMBERS[machine], call, family) == ALLOWED}
        assert allowed == {1, 2, 10, 16}
        assert verdict(machine, NUMBERS[machine], call, 40) == NO_FAMILY
        # The kernel takes the lower half of the argument.
        assert verdict(machine, NUMBERS[machine], call, (1 << 32) | 40) == NO_FAMILY
        assert verdict(machine, NUMBERS[machine], call, 0xFFFFFFFF) == NO_FAMILY


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_calls(machine: str) -> None:
    *_, read, bpf, ring = CALLS[machine]
    assert verdict(machine, NUMBERS[machine], read) == ALLOWED
    assert verdict(machine, NUMBERS[machine], bpf) == verdict(machine, NUMBERS[machine], ring) == REFUSED


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("architecture", [I386, ARM, 0])
def test_calls_of_another_architecture_end_the_process(machine: str, architecture: int) -> None:
    # `socketcall` is among them: it makes sockets of a family that a filter cannot see.
    for call in (102, 359, 0):
        assert verdict(machine, architecture, call, 40) == ENDED


def test_second_names_of_calls_are_refused() -> None:
    for call in (41, 53, 0):
        assert verdict("x86_64", X86_64, 0x40000000 | call, 2) == REFUSED


def test_machine_whose_calls_are_not_known_has_no_filter() -> None:
    assert program_limits.call_filter("riscv64") is None
