"""Whether files that no honest program makes do harm, in boxes and in archives."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.agent.boxes.box import BoxBlocked, BoxEnded, BoxError, LiveBox
from recipes.agent.boxes.boxes import BoxHost
from tests.unit.recipes.agent.boxes.running import LIMITS, archive_of, in_box, live, mentioning, one_box, sh

pytestmark = pytest.mark.security


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
            while not (pids := mentioning([box.name])):
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
        (tmp_path / "a.tar").write_bytes(archive_of(*members))
        try:
            with open(tmp_path / "a.tar", "rb") as file, pytest.raises(BoxError, match=why):
                await boxes.unpack(file.fileno(), box_folder / "layers/bad", 1000, 10)
        finally:
            await boxes.remove(box_folder / "layers/bad")
            await boxes.close()

    asyncio.run(act())
    assert not (box_folder / "layers/x").exists()
    assert not (box_folder / "layers/bad").exists()
