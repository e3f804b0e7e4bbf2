"""Whether boxes run commands, keep what they should, and are gone with their owners."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.agent.boxes import box_probe, starter
from recipes.agent.boxes import boxes as boxes_module
from recipes.agent.boxes.box import BoxBlocked, BoxEnded, BoxError, Done, LiveBox, Written
from recipes.agent.boxes.boxes import MIB, BoxHost, BoxLimits, own_ids
from rlinf_core import ConfigError
from tests.unit.recipes.agent.tools.escapes import ESCAPES, program_of

pytestmark = pytest.mark.security

LIMITS = BoxLimits(memory=256 * MIB, processes=64, disk=64 * MIB)
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


@asynccontextmanager
async def one_box(folder: Path, limits: BoxLimits = LIMITS, **settings: Any) -> AsyncIterator[tuple[BoxHost, LiveBox]]:
    boxes = BoxHost(folder, 4096)
    try:
        layers = [*settings.pop("above", ()), folder / "layers/host"]
        async with boxes.box(layers, limits, **{"workdir": "/app", **settings}) as box:
            yield boxes, box
    finally:
        await boxes.close()


def in_box(folder: Path, act: Callable[[LiveBox], Coroutine[Any, Any, Any]], limits: BoxLimits = LIMITS) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(60), one_box(folder, limits) as (_, box):
            return await act(box)

    return asyncio.run(run())


async def sh(box: LiveBox, script: str, timeout: float = 30.0, **settings: Any) -> Done:
    return await box.run(["bash", "-c", script], timeout=timeout, **settings)


async def put(box: LiveBox, archive: bytes, target: str) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(archive)
        file.seek(0)
        await box.put(file, target)


def live(folder: Path) -> list[str]:
    return os.listdir(folder / "live")


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_commands_have_streams_a_status_and_a_folder(box_folder: Path) -> None:
    async def act(box: LiveBox) -> list[Done]:
        return [
            await sh(box, 'pwd; echo "$A" >&2; exit 3', env={"A": "a b"}),
            await sh(box, "kill -9 $$"),
            await box.run(["no-such-program"], timeout=30),
            await sh(box, "pwd", cwd="/tmp"),
            await sh(box, "pwd", cwd="/missing"),
        ]

    first, killed, missing, elsewhere, nowhere = in_box(box_folder, act)
    assert (first.status, first.output, first.errors) == (3, b"/app\n", b"a b\n")
    assert killed.status == -9
    assert (missing.status, missing.errors) == (126, b"no-such-program: No such file or directory\n")
    assert elsewhere.output == b"/tmp\n"
    assert nowhere.status == 126
    assert live(box_folder) == []


def test_commands_run_at_once_and_a_slow_one_is_killed(box_folder: Path) -> None:
    async def act(box: LiveBox) -> list[Done]:
        return await asyncio.gather(sh(box, "sleep 600", 0.2), *(sh(box, f"sleep 0.05; echo {n}") for n in range(5)))

    slow, *others = in_box(box_folder, act)
    assert slow.timed_out
    assert [done.output for done in others] == [b"%d\n" % number for number in range(5)]


def test_a_flood_is_cut_and_the_background_holds_nothing_up(box_folder: Path) -> None:
    async def act(box: LiveBox) -> tuple[Done, Done]:
        return await sh(box, "yes | head -c 3000000"), await sh(box, "sleep 600 & echo begun")

    flood, left = in_box(box_folder, act)
    assert (flood.status, len(flood.output)) == (0, LIMITS.output)
    assert left.output == b"begun\n"


def test_a_command_that_is_too_long_fails_as_in_a_shell(box_folder: Path) -> None:
    done = in_box(box_folder, lambda box: sh(box, f"echo {'x' * 300_000}"))
    assert (done.status, done.errors) == (126, b"Argument list too long\n")


def test_users_are_those_of_the_box(box_folder: Path) -> None:
    async def act(box: LiveBox) -> list[Done]:
        return [await sh(box, "id -u", user=user) for user in ("", "root", "nobody", "1000:1000", "who")]

    done = in_box(box_folder, act)
    assert [ended.output for ended in done[:2]] == [b"0\n", b"0\n"]
    assert done[4].status == 126
    if own_ids()["how"] != "single":
        assert [ended.output for ended in done[2:4]] == [b"65534\n", b"1000\n"]


def test_root_of_a_box_is_nobody_outside(box_folder: Path) -> None:
    async def act() -> set[int]:
        async with one_box(box_folder) as (boxes, box):
            await sh(box, "echo > mine; chmod 4755 mine")
            path = boxes.folder / "live" / box.name / "upper/app/mine"
            return {path.stat().st_uid, *(os.stat(f"/proc/{pid}").st_uid for pid in await _pids(box))}

    (uid,) = asyncio.run(act())
    assert uid != 0
    assert uid == own_ids()["users"][0]


async def _pids(box: LiveBox) -> list[str]:
    """Return the processes of the machine that are in the box."""
    task = asyncio.ensure_future(sh(box, f": {box.name}; sleep 600; true"))
    try:
        while True:
            pids = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if box.name in _command_of(pid)]
            if pids:
                return pids
            await asyncio.sleep(0.01)
    finally:
        task.cancel()


def _command_of(pid: str) -> str:
    with contextlib.suppress(OSError):
        return Path("/proc", pid, "cmdline").read_text(encoding="utf-8", errors="replace")
    return ""


def test_the_next_box_sees_what_was_kept_and_nothing_else(box_folder: Path) -> None:
    async def act() -> tuple[Any, bytes, Written | None, Written | None]:
        async with one_box(box_folder) as (boxes, box):
            await sh(box, "echo 1 > one; ln -s one link; mkdir deep; echo > deep/x; echo > /etc/mine; rm /usr/bin/cat")
            await sh(box, "mkdir /app/gone; echo > /app/gone/a", cwd="/")
            left = await box.finish(["/app"], ["/app/deep"])
            text, link = await box.read("/app/one"), await box.read("/app/link")
            async with boxes.box([boxes.kept(box), box_folder / "layers/host"], LIMITS, workdir="/app") as second:
                seen = await sh(second, "ls /app; cat one; test -e /etc/mine || echo clean")
            return left, seen.output, text, link

    left, seen, text, link = asyncio.run(act())
    assert seen == b"gone\nlink\none\n1\nclean\n"
    assert set(left.dropped) == {"/app/deep/x", "/etc/mine", "/usr/bin/cat"}
    assert text is not None
    assert (text.data, link) == (b"1\n", None)


def test_files_that_a_box_removed_are_gone_in_the_next(box_folder: Path) -> None:
    async def act() -> bytes:
        async with one_box(box_folder) as (boxes, box):
            await sh(box, "rm /etc/passwd; rm -r /etc; mkdir /etc; echo > /etc/new")
            await box.finish(["/etc"])
            async with boxes.box([boxes.kept(box), box_folder / "layers/host"], LIMITS) as second:
                return (await sh(second, "ls /etc")).output

    assert asyncio.run(act()) == b"new\n"


def test_finishing_counts_the_processes_that_were_left(box_folder: Path) -> None:
    async def act(box: LiveBox) -> Any:
        await sh(box, "setsid sleep 600 &")
        return await box.finish()

    assert in_box(box_folder, act).running == 1


def test_finishing_waits_for_processes_that_are_about_to_end(box_folder: Path) -> None:
    async def act(box: LiveBox) -> Any:
        await sh(box, "sleep 0.1 && echo 1 > done &")
        left = await box.finish(grace=50.0)
        return left.running, await box.read("/app/done")

    assert in_box(box_folder, act) == (0, Written(b"1\n", late=True))


@pytest.mark.parametrize(
    ("late", "way"),
    [
        (False, "true"),
        (True, "echo 2 > /app/in/file"),
        (True, "mv /app/other /app/in/file"),
        (True, "mv /app/in /app/out; mv /app/twin /app/in"),
    ],
)
def test_a_file_that_changes_after_the_last_command_is_late(late: bool, way: str, box_folder: Path) -> None:
    made = "mkdir in twin; echo 1 > in/file; echo 2 > twin/file; echo 2 > other"

    async def act(box: LiveBox) -> Written | None:
        await sh(box, f"{made}; parent=$$; setsid bash -c 'while [ -e /proc/'$$' ]; do sleep 0.01; done; {way}' &")
        await box.finish(grace=50.0)
        return await box.read("/app/in/file")

    assert in_box(box_folder, act) == Written(b"2\n" if late else b"1\n", late)


def test_reading_follows_nothing_and_waits_for_nothing(box_folder: Path) -> None:
    make = (
        "python3 -c 'import os; os.mkfifo(\"/app/fifo\")'; mkdir folder; ln -s /dev/zero device;"
        " mkdir /far; echo 1 > /far/x; ln -s /far link; echo 1 > real"
    )
    paths = ("fifo", "folder", "device", "link/x", "missing")

    async def act(box: LiveBox) -> tuple[Written | None, dict[str, Written | None]]:
        await sh(box, make)
        await box.finish()
        return await box.read("/app/real"), {path: await box.read(f"/app/{path}") for path in paths}

    assert in_box(box_folder, act) == (Written(b"1\n", late=False), dict.fromkeys(paths))


def test_put_unpacks_an_archive_as_root_of_the_box(box_folder: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("deep/run.sh")
        info.size, info.mode, info.uid = 7, 0o755, 12345
        archive.addfile(info, io.BytesIO(b"echo hi"))

    async def act(box: LiveBox) -> Done:
        await put(box, buffer.getvalue(), "/tests")
        return await sh(box, "/tests/deep/run.sh; stat -c %u:%a /tests/deep/run.sh")

    assert in_box(box_folder, act).output == b"hi\n0:755\n"


def test_no_descriptor_leads_an_archive_out_of_its_box(box_folder: Path) -> None:
    """Links to descriptors of whoever unpacks, where an archive's file could come to lie beside the box's own."""
    numbers = range(3, 40)

    async def act() -> list[str]:
        async with one_box(box_folder) as (boxes, box):
            await sh(box, "for n in {3..39}; do ln -s /proc/self/fd/$n /l$n; done; ln -s /proc/self/cwd /cwd")
            for target in [*(f"/l{number}" for number in numbers), "/cwd/../.."]:
                with contextlib.suppress(BoxError):
                    await put(box, _archive(("led-out", "file", "1")), target)
            within = await sh(box, "test -e /led-out && echo in")
            assert within.output == b"in\n"
            own = boxes.folder / "live" / box.name
            folders = (own.parent, own, boxes.folder, own / "work", own / "root", *own.parents)
            return [str(folder) for folder in folders if (folder / "led-out").exists()]

    assert asyncio.run(act()) == []


def test_an_archive_that_cannot_be_unpacked_says_why(box_folder: Path) -> None:
    async def act(box: LiveBox) -> None:
        await sh(box, "echo > /app/file")
        for archive, target, why in (
            (_archive(("../x", "file", "1")), "/app", "leads out of the folder"),
            (b"x" * 20_000, "/app", "could not be opened|bad checksum|truncated|invalid header"),
            (_archive(("x", "file", "1")), "/app/file", "File exists|Not a directory"),
        ):
            with pytest.raises(BoxError, match=why):
                await put(box, archive, target)

    in_box(box_folder, act)


# Files as no honest program makes them

DEEP = 3000
DIG = (
    "import os, sys\n"
    "os.chdir(sys.argv[1])\n"
    f"for _ in range({DEEP}):\n"
    "    os.mkdir('folder'), os.chdir('folder')\n"
    "open('bottom', 'wb').write(b'x' * int(sys.argv[2]))\n"
)


def test_folders_of_any_depth_are_kept_dropped_and_removed(box_folder: Path) -> None:
    measure = f"import os\nfor _ in range({DEEP}): os.chdir('folder')\nprint(os.listdir())"

    async def act() -> tuple[Any, bytes]:
        async with one_box(box_folder) as (boxes, box):
            for folder in ("/app", "/tmp"):
                dug = await box.run(["python3", "-c", DIG, folder, "1"], timeout=60)
                assert dug.status == 0, dug.errors
            left = await box.finish(["/app"])
            async with boxes.box([boxes.kept(box), box_folder / "layers/host"], LIMITS, workdir="/app") as second:
                return left, (await second.run(["python3", "-c", measure], timeout=60)).output

    left, seen = asyncio.run(act())
    assert seen == b"['bottom']\n"
    assert left.dropped_count == 1
    assert left.dropped[0].startswith("/tmp/folder/folder/")
    assert live(box_folder) == []


def test_deep_files_fill_the_disk_as_others_do(box_folder: Path) -> None:
    async def act(box: LiveBox) -> None:
        for folder in ("/app", "/tmp"):
            await box.run(["python3", "-c", DIG, folder, "40000000"], timeout=60)
        await sh(box, "sleep 600")

    with pytest.raises(BoxEnded, match="it wrote more than 64 MiB"):
        in_box(box_folder, act)


def test_a_box_that_makes_too_many_files_ends(box_folder: Path) -> None:
    async def act(box: LiveBox) -> Any:
        with pytest.raises(BoxEnded, match="it made more than 2000 files"):
            await sh(box, "for n in {1..3000}; do : > /app/$n; done; sleep 600")
        return await box.finish(["/app"])

    in_box(box_folder, act, replace(LIMITS, files=2000))


def test_no_more_files_than_allowed_are_kept(box_folder: Path) -> None:
    async def act() -> tuple[str, bytes]:
        async with one_box(box_folder, replace(LIMITS, files=2000)) as (boxes, box):
            with contextlib.suppress(BoxEnded):
                await sh(box, "for n in {1..3000}; do : > /app/$n; done")
            await box.finish(["/app"])
            async with boxes.box([boxes.kept(box), box_folder / "layers/host"], LIMITS) as second:
                return box.over, (await sh(second, "ls /app | wc -l")).output

    over, seen = asyncio.run(act())
    assert over == "it made more than 2000 files"
    assert 1900 < int(seen) <= 2000


def test_empty_files_in_memory_are_bounded(box_folder: Path) -> None:
    fill = (
        "import itertools, sys\n"
        "try:\n"
        "    for n in itertools.count(): open(f'{sys.argv[1]}/{n}', 'w').close()\n"
        "except OSError: print(n)\n"
    )

    async def act(box: LiveBox) -> list[int]:
        return [int((await box.run(["python3", "-c", fill, path], timeout=60)).output) for path in ("/dev", "/dev/shm")]

    assert all(count < 20_000 for count in in_box(box_folder, act))


def test_names_of_what_was_dropped_fit_into_a_message(box_folder: Path) -> None:
    make = (
        "import os\n"
        "for _ in range(15):\n"
        "    os.mkdir(b'\\xff' * 255), os.chdir(b'\\xff' * 255)\n"
        "for n in range(300): open(str(n), 'w').close()\n"
    )

    async def act(box: LiveBox) -> Any:
        await box.run(["python3", "-c", make], cwd="/tmp", timeout=60)
        return await box.finish(["/app"])

    left = in_box(box_folder, act)
    assert left.dropped_count == 300
    assert len(left.dropped) >= 10
    "".join(left.dropped).encode()


def test_a_reply_that_is_too_long_is_an_error(box_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.agent.boxes.box.READ_BYTES", 1 << 20)

    async def act(box: LiveBox) -> None:
        await sh(box, "head -c 300000 /dev/zero > /app/file")
        await box.finish()
        with pytest.raises(BoxError, match="Message too long"):
            await box.read("/app/file")

    in_box(box_folder, act)


@pytest.mark.parametrize("left", ["rm -r /app; echo > /app", "rm -r /app; ln -s /app /app", "rm -r /app; ln -s x /app"])
def test_a_layer_without_the_work_folder_blocks_a_box(left: str, box_folder: Path) -> None:
    async def act() -> None:
        async with one_box(box_folder) as (boxes, box):
            await sh(box, left, cwd="/")
            await box.finish(["/app"])
            with pytest.raises(BoxBlocked, match="`/app` is no folder"):
                async with boxes.box([boxes.kept(box), box_folder / "layers/host"], LIMITS, workdir="/app"):
                    pass

    asyncio.run(act())


@pytest.mark.skipif(os.getuid() != 0, reason="only root sees descriptors of others")
def test_no_process_of_a_box_has_a_descriptor_of_the_host(box_folder: Path) -> None:
    async def act() -> dict[str, list[str]]:
        async with one_box(box_folder) as (_, box):
            running = asyncio.ensure_future(sh(box, f": {box.name}; sleep 600; true"))
            while not (pids := _mentioning([box.name])):
                await asyncio.sleep(0.01)
            space = _space_of(pids[0])
            seen = {_name_of(pid): _descriptors(pid) for pid in os.listdir("/proc") if _space_of(pid) == space}
            running.cancel()
            return seen

    seen = asyncio.run(act())
    assert seen.pop("rlinf-box-init") == []
    for places in seen.values():
        assert [place.partition(":")[0] for place in places] == ["/dev/null", "pipe", "pipe"]


def _space_of(pid: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def _name_of(pid: str) -> str:
    return Path("/proc", pid, "comm").read_text(encoding="utf-8").strip()


def _descriptors(pid: str) -> list[str]:
    return [os.readlink(f"/proc/{pid}/fd/{number}") for number in sorted(os.listdir(f"/proc/{pid}/fd"), key=int)]


# Archives that lead out


def _archive(*members: tuple[str, str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, text in members:
            info = tarfile.TarInfo(name)
            if kind == "file":
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
            else:
                info.type = tarfile.SYMTYPE if kind == "link" else tarfile.LNKTYPE
                info.linkname = text
                archive.addfile(info)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ((("../x", "file", "1"),), "leads out"),
        ((("a/../../x", "file", "1"),), "leads out"),
        ((("a", "link", "/"), ("a/tmp/x", "file", "1")), "is below a link"),
        ((("a", "link", ".."), ("a/x", "file", "1")), "is below a link"),
        ((("x", "hard", "../../secret"),), "leads out"),
        ((("x", "hard", "/etc/hostname"),), "No such file"),
        ((("x", "file", "1" * 2000),), "more than"),
        (tuple((f"f{n}", "file", "") for n in range(20)), "more than"),
    ],
)
def test_an_archive_that_leads_out_or_is_too_large_is_refused(
    members: tuple[tuple[str, str, str], ...], why: str, box_folder: Path, tmp_path: Path
) -> None:
    async def act() -> None:
        boxes = BoxHost(box_folder, 4096)
        (tmp_path / "a.tar").write_bytes(_archive(*members))
        try:
            with open(tmp_path / "a.tar", "rb") as file, pytest.raises(BoxError, match=why):
                await boxes.unpack(file.fileno(), box_folder / "layers/bad", 1000, 10)
        finally:
            await boxes.remove(box_folder / "layers/bad")
            await boxes.close()

    asyncio.run(act())
    assert not (box_folder / "layers/x").exists()
    assert not (box_folder / "layers/bad").exists()


# Limits


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


def test_nothing_gets_out_of_a_box(box_folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret that no box may read", encoding="utf-8")
    host = {"secret": str(secret), "value": "a secret that", "code": __file__, "pid": os.getpid(), "port": 1}
    facts = json.dumps({**host, "address": "10.0.0.1", "socket": str(tmp_path / "s"), "abstract": "a", "key": 1})
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


# Owners


def left_by_owner(killed: str, folder: Path, boxes: int) -> list[str]:
    """Start an owner of boxes whose commands would outlive it, end it in some way, and return what is left of mounts.

    Fails where processes or folders of the boxes are left after a while.
    """
    before = _mounts()
    command = [sys.executable, "-m", "tests.unit.recipes.agent.boxes.owner", str(folder), str(boxes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        try:
            assert owner.stdout is not None
            facts = json.loads(owner.stdout.readline())
            names: list[str] = facts["names"]
            assert len(_mentioning(names)) >= len(names)
            if "holder" in killed:
                for pid in facts["holders"]:
                    os.kill(pid, signal.SIGKILL)
            if "starter" in killed:
                os.kill(facts["starter"], signal.SIGKILL)
            if "owner" in killed:
                owner.send_signal(signal.SIGTERM if "term" in killed else signal.SIGKILL)
            if "interrupted" in killed:
                owner.send_signal(signal.SIGINT)
            until(lambda: not _mentioning(names))
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


def _mentioning(names: list[str]) -> list[str]:
    return [pid for pid in filter(str.isdigit, os.listdir("/proc")) if any(name in _command_of(pid) for name in names)]


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


def test_another_starter_starts_where_one_was_killed(box_folder: Path) -> None:
    async def act() -> bytes:
        async with one_box(box_folder) as (boxes, box):
            assert boxes._starter is not None
            boxes._starter.kill()
            boxes._starter.wait()
            async with boxes.box([box_folder / "layers/host"], LIMITS) as second:
                return (await sh(box, "echo 1")).output + (await sh(second, "echo 2")).output

    assert asyncio.run(act()) == b"1\n2\n"


def test_a_request_that_cannot_be_sent_ends_no_starter(box_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def act() -> None:
        async with one_box(box_folder) as (boxes, _):
            before = boxes._starter
            with monkeypatch.context() as patch:
                patch.setattr("socket.send_fds", full)
                with pytest.raises(BoxError, match="Too many open files"):
                    async with boxes.box([box_folder / "layers/host"], LIMITS):
                        pass
            assert boxes._starter is before

    asyncio.run(act())


def test_a_fork_of_the_owner_does_not_keep_its_boxes(box_folder: Path) -> None:
    async def act() -> None:
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

    asyncio.run(act())
    assert live(box_folder) == []


def test_a_box_that_cannot_be_made_says_why(box_folder: Path) -> None:
    async def act() -> None:
        async with one_box(box_folder, above=[box_folder / "layers/missing"]):
            pass

    with pytest.raises(BoxError, match="overlay"):
        asyncio.run(act())
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
    assert "`agent.environment.box_folder`" in result["what"]


def test_a_folder_that_cannot_hold_boxes_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot hold boxes") as error:
        BoxHost(tmp_path / "file/boxes", 1024)
    assert error.value.why == "Not a directory"


def test_a_box_may_not_need_more_than_its_node_has(tmp_path: Path) -> None:
    async def act() -> None:
        async with BoxHost(tmp_path, 1024).admission.admit(1025):
            pass

    with pytest.raises(ConfigError, match="1025 MiB"):
        asyncio.run(act())
