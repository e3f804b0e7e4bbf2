"""Whether boxes run commands, and keep what they should."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path

import pytest

from recipes.agent.boxes.box import BoxError, Written
from recipes.agent.boxes.boxes import own_ids
from tests.unit.recipes.agent.boxes.running import LIMITS, archive_of, live, one_box, pids_of, put, sh

pytestmark = pytest.mark.security


async def test_commands_have_streams_a_status_and_a_folder(box_folder: Path) -> None:
    async with one_box(box_folder) as (_, box):
        first = await sh(box, 'pwd; echo "$A" >&2; exit 3', env={"A": "a b"})
        assert (first.status, first.output, first.errors) == (3, b"/app\n", b"a b\n")
        assert (await sh(box, "kill -9 $$")).status == -9
        missing = await box.run(["no-such-program"], timeout=30)
        assert (missing.status, missing.errors) == (126, b"no-such-program: No such file or directory\n")
        assert (await sh(box, "pwd", cwd="/tmp")).output == b"/tmp\n"
        assert (await sh(box, "pwd", cwd="/missing")).status == 126
    assert live(box_folder) == []


async def test_commands_run_at_once_and_a_slow_one_is_killed(box_folder: Path) -> None:
    async with one_box(box_folder) as (_, box):
        commands = (sh(box, f"sleep 0.05; echo {number}") for number in range(5))
        slow, *others = await asyncio.gather(sh(box, "sleep 600", 0.2), *commands)
    assert slow.timed_out
    assert [done.output for done in others] == [b"%d\n" % number for number in range(5)]


async def test_a_flood_is_cut_and_the_background_holds_nothing_up(box_folder: Path) -> None:
    async with one_box(box_folder) as (_, box):
        flood = await sh(box, "yes | head -c 3000000")
        assert (flood.status, len(flood.output)) == (0, LIMITS.output)
        assert (await sh(box, "sleep 600 & echo begun")).output == b"begun\n"


async def test_a_command_that_is_too_long_fails_as_in_a_shell(box_folder: Path) -> None:
    async with one_box(box_folder) as (_, box):
        done = await sh(box, f"echo {'x' * 300_000}")
    assert (done.status, done.errors) == (126, b"Argument list too long\n")


async def test_users_are_those_of_the_box(box_folder: Path) -> None:
    async with one_box(box_folder) as (_, box):
        users = ("", "root", "nobody", "me", "1001", "1000:root", "root:nogroup", "who", "root:who")
        await sh(box, "echo me:x:1000:1000::/home/me:/bin/sh >> /etc/passwd")
        done = [await sh(box, "id -u; id -g; echo $HOME", user=user) for user in users]
    assert [ended.output for ended in done[:2]] == [b"0\n0\n/root\n"] * 2
    assert [ended.status for ended in done[-2:]] == [126, 126]
    if own_ids()["how"] != "single":
        ids = [ended.output.decode().split() for ended in done[2:-2]]
        assert ids == [
            ["65534", "65534", "/"],
            ["1000", "1000", "/home/me"],
            ["1001", "0", "/"],
            ["1000", "0", "/home/me"],
            ["0", "65534", "/root"],
        ]


async def test_a_box_has_names_and_files_of_its_outputs(box_folder: Path) -> None:
    names = "import socket as s; print(*(s.gethostbyname(n) for n in ('localhost', s.gethostname())))"
    async with one_box(box_folder) as (_, box):
        for user in ("", "nobody"):
            done = await sh(box, f'python3 -c "{names}" > /dev/stdout; echo told > /dev/stderr', user=user)
            assert (done.output, done.errors) == (b"127.0.0.1 127.0.0.1\n", b"told\n")


async def test_root_of_a_box_is_nobody_outside(box_folder: Path) -> None:
    async with one_box(box_folder) as (boxes, box):
        await sh(box, "echo > mine; chmod 4755 mine")
        path = boxes.folder / "live" / box.name / "upper/app/mine"
        (uid,) = {path.stat().st_uid, *(os.stat(f"/proc/{pid}").st_uid for pid in await pids_of(box))}
    assert uid != 0
    assert uid == own_ids()["users"][0]


async def test_the_next_box_sees_what_was_kept_and_nothing_else(box_folder: Path) -> None:
    async with one_box(box_folder) as (boxes, box):
        await sh(box, "echo 1 > one; ln -s one link; mkdir deep; echo > deep/x; echo > /etc/mine; rm /usr/bin/cat")
        await sh(box, "mkdir /app/gone; echo > /app/gone/a", cwd="/")
        left = await box.finish(["/app"], ["/app/deep"])
        assert set(left.dropped) == {"/app/deep/x", "/etc/mine", "/usr/bin/cat"}
        text = await box.read("/app/one")
        assert text is not None
        assert (text.data, await box.read("/app/link")) == (b"1\n", None)
        async with boxes.box([boxes.kept(box), box_folder / "layers/host"], LIMITS, workdir="/app") as second:
            seen = await sh(second, "ls /app; cat one; test -e /etc/mine || echo clean")
    assert seen.output == b"gone\nlink\none\n1\nclean\n"


async def test_files_that_a_box_removed_are_gone_in_the_next(box_folder: Path) -> None:
    async with one_box(box_folder) as (boxes, box):
        await sh(box, "rm /etc/passwd; rm -r /etc; mkdir /etc; echo > /etc/new")
        await box.finish(["/etc"])
        async with boxes.box([boxes.kept(box), box_folder / "layers/host"], LIMITS) as second:
            assert (await sh(second, "ls /etc")).output == b"new\n"


async def test_finishing_counts_the_processes_that_were_left(box_folder: Path) -> None:
    async with one_box(box_folder) as (_, box):
        await sh(box, "setsid sleep 600 &")
        assert (await box.finish()).running == 1


async def test_finishing_waits_for_processes_that_are_about_to_end(box_folder: Path) -> None:
    async with one_box(box_folder) as (_, box):
        await sh(box, "sleep 0.1 && echo 1 > done &")
        assert (await box.finish(grace=50.0)).running == 0
        assert await box.read("/app/done") == Written(b"1\n", late=True)


@pytest.mark.parametrize(
    ("late", "way"),
    [
        (False, "true"),
        (True, "echo 2 > /app/in/file"),
        (True, "mv /app/other /app/in/file"),
        (True, "mv /app/in /app/out; mv /app/twin /app/in"),
    ],
)
async def test_a_file_that_changes_after_the_last_command_is_late(late: bool, way: str, box_folder: Path) -> None:
    made = "mkdir in twin; echo 1 > in/file; echo 2 > twin/file; echo 2 > other"
    # Times of files have the steps of the kernel's clock, 10 ms at most.
    ended = "while [ -e /proc/'$$' ]; do sleep 0.01; done; sleep 0.1"
    async with one_box(box_folder) as (_, box):
        await sh(box, f"{made}; parent=$$; setsid bash -c '{ended}; {way}' &")
        await box.finish(grace=50.0)
        assert await box.read("/app/in/file") == Written(b"2\n" if late else b"1\n", late)


async def test_reading_follows_nothing_and_waits_for_nothing(box_folder: Path) -> None:
    make = (
        "python3 -c 'import os; os.mkfifo(\"/app/fifo\")'; mkdir folder; ln -s /dev/zero device;"
        " mkdir /far; echo 1 > /far/x; ln -s /far link; echo 1 > real"
    )
    async with one_box(box_folder) as (_, box):
        await sh(box, make)
        await box.finish()
        assert await box.read("/app/real") == Written(b"1\n", late=False)
        for path in ("fifo", "folder", "device", "link/x", "missing"):
            assert await box.read(f"/app/{path}") is None, path


async def test_put_unpacks_an_archive_as_root_of_the_box(box_folder: Path) -> None:
    packed = archive_of(("deep/run.sh", "file", "echo hi"), mode=0o755, uid=12345)
    async with one_box(box_folder) as (_, box):
        await put(box, packed, "/tests")
        done = await sh(box, "/tests/deep/run.sh; stat -c %u:%a /tests/deep/run.sh")
    assert done.output == b"hi\n0:755\n"


async def test_no_descriptor_leads_an_archive_out_of_its_box(box_folder: Path) -> None:
    """Links to descriptors of whoever unpacks, where an archive's file could come to lie beside the box's own."""
    async with one_box(box_folder) as (boxes, box):
        await sh(box, "for n in {3..39}; do ln -s /proc/self/fd/$n /l$n; done; ln -s /proc/self/cwd /cwd")
        for target in [*(f"/l{number}" for number in range(3, 40)), "/cwd/../.."]:
            with contextlib.suppress(BoxError):
                await put(box, archive_of(("led-out", "file", "1")), target)
        assert (await sh(box, "test -e /led-out && echo in")).output == b"in\n"
        own = boxes.folder / "live" / box.name
        folders = (own.parent, own, boxes.folder, own / "work", own / "root", *own.parents)
        assert [folder for folder in folders if (folder / "led-out").exists()] == []


async def test_an_archive_that_cannot_be_unpacked_says_why(box_folder: Path) -> None:
    async with one_box(box_folder) as (_, box):
        await sh(box, "echo > /app/file")
        for archive, target, why in (
            (archive_of(("../x", "file", "1")), "/app", "leads out of the folder"),
            (b"x" * 20_000, "/app", "could not be opened|bad checksum|truncated|invalid header"),
            (archive_of(("x", "file", "1")), "/app/file", "File exists|Not a directory"),
        ):
            with pytest.raises(BoxError, match=why):
                await put(box, archive, target)


async def test_it_is_said_what_runs_in_boxes(box_folder: Path) -> None:
    async with one_box(box_folder, title="box of a task") as (boxes, box):
        idle = boxes.shown()
        task = asyncio.ensure_future(sh(box, "sleep 600"))
        await asyncio.sleep(0)
        busy = boxes.shown()
        task.cancel()
        await box.finish()
        # Its tests run elsewhere: it is no second box of its task.
        assert boxes.shown() == []
    assert boxes.shown() == []
    assert idle[0] == "holds 1 box, 4096 of 4096 MiB for boxes are free"
    assert re.fullmatch(r"box of a task for [\d.]+ s: idle", idle[1])
    assert re.fullmatch(r"box of a task for [\d.]+ s: sleep 600", busy[1])
