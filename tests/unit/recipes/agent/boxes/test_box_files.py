"""Whether files that no honest program makes do harm, in boxes and in archives."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.agent.boxes import layer_files, trees
from recipes.agent.boxes.box import BoxBlocked, BoxEnded, BoxError
from recipes.agent.boxes.boxes import BoxHost
from tests.unit.recipes.agent.boxes.running import LIMITS, archive_of, live, mentioning, one_box, sh

pytestmark = pytest.mark.security


# More than a path has bytes and a function has calls.
DEEP = 1200
DIG = (
    "import os, sys\n"
    "os.chdir(sys.argv[1])\n"
    f"for _ in range({DEEP}):\n"
    "    os.mkdir('folder'), os.chdir('folder')\n"
    "open('bottom', 'wb').write(b'x' * int(sys.argv[2]))\n"
)


async def test_folders_of_any_depth_are_kept_dropped_and_removed(box_folder: Path) -> None:
    measure = f"import os\nfor _ in range({DEEP}): os.chdir('folder')\nprint(os.listdir())"
    async with one_box(box_folder) as (boxes, box):
        for folder in ("/app", "/tmp"):
            dug = await box.run(["python3", "-c", DIG, folder, "1"], timeout=60)
            assert dug.status == 0, dug.errors
        left = await box.finish(["/app"])
        async with boxes.box([boxes.kept(box), box_folder / "layers/host"], LIMITS, workdir="/app") as second:
            seen = await second.run(["python3", "-c", measure], timeout=60)
    assert seen.output == b"['bottom']\n"
    assert left.dropped_count == 1
    assert left.dropped[0].startswith("/tmp/folder/folder/")
    assert live(box_folder) == []


async def test_deep_files_fill_the_disk_as_others_do(box_folder: Path) -> None:
    with pytest.raises(BoxEnded, match="it wrote more than 64 MiB"):  # noqa: PT012 - in whichever command
        async with one_box(box_folder) as (_, box):
            for folder in ("/app", "/tmp"):
                await box.run(["python3", "-c", DIG, folder, "40000000"], timeout=60)
            await sh(box, "sleep 600")


async def test_a_box_that_makes_too_many_files_ends_and_keeps_no_more(box_folder: Path) -> None:
    async with one_box(box_folder, replace(LIMITS, files=2000)) as (boxes, box):
        with pytest.raises(BoxEnded, match="it made more than 2000 files"):
            await sh(box, "for n in {1..3000}; do : > /app/$n; done; sleep 600")
        await box.finish(["/app"])
        async with boxes.box([boxes.kept(box), box_folder / "layers/host"], LIMITS) as second:
            assert 1900 < int((await sh(second, "ls /app | wc -l")).output) <= 2000


async def test_empty_files_in_memory_are_bounded(box_folder: Path) -> None:
    fill = (
        "import itertools, sys\n"
        "try:\n"
        "    for n in itertools.count(): open(f'{sys.argv[1]}/{n}', 'w').close()\n"
        "except OSError: print(n)\n"
    )

    async with one_box(box_folder) as (_, box):
        for path in ("/dev", "/dev/shm"):
            assert int((await box.run(["python3", "-c", fill, path], timeout=60)).output) < 20_000


async def test_names_of_what_was_dropped_fit_into_a_message(box_folder: Path) -> None:
    make = (
        "import os\n"
        "for _ in range(15):\n"
        "    os.mkdir(b'\\xff' * 255), os.chdir(b'\\xff' * 255)\n"
        "for n in range(300): open(str(n), 'w').close()\n"
    )

    async with one_box(box_folder) as (_, box):
        await box.run(["python3", "-c", make], cwd="/tmp", timeout=60)
        left = await box.finish(["/app"])
    assert left.dropped_count == 300
    assert len(left.dropped) >= 10
    "".join(left.dropped).encode()


async def test_a_reply_that_is_too_long_is_an_error(box_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.agent.boxes.box.READ_BYTES", 1 << 20)
    async with one_box(box_folder) as (_, box):
        await sh(box, "head -c 300000 /dev/zero > /app/file")
        await box.finish()
        with pytest.raises(BoxError, match="Message too long"):
            await box.read("/app/file")


@pytest.mark.parametrize("left", ["rm -r /app; echo > /app", "rm -r /app; ln -s /app /app", "rm -r /app; ln -s x /app"])
async def test_a_layer_without_the_work_folder_blocks_a_box(left: str, box_folder: Path) -> None:
    async with one_box(box_folder) as (boxes, box):
        await sh(box, left, cwd="/")
        await box.finish(["/app"])
        with pytest.raises(BoxBlocked, match="`/app` is no folder"):
            async with boxes.box([boxes.kept(box), box_folder / "layers/host"], LIMITS, workdir="/app"):
                pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root sees descriptors of others")
async def test_no_process_of_a_box_has_a_descriptor_of_the_host(box_folder: Path) -> None:
    async with one_box(box_folder) as (_, box):
        running = asyncio.ensure_future(sh(box, f": {box.name}; sleep 600; true"))
        # A shell reads `/etc/passwd` as it starts: only when its command runs does it hold what it keeps.
        while "sleep" not in (pids := _processes_of(box.name)):
            await asyncio.sleep(0.01)
        seen = {name: _descriptors(pid) for name, pid in pids.items()}
        running.cancel()
    assert seen.pop("rlinf-box-init") == []
    for places in seen.values():
        assert [place.partition(":")[0] for place in places] == ["/dev/null", "pipe", "pipe"]


def _processes_of(box: str) -> dict[str, str]:
    """Return the processes in the name space of a box, by name."""
    spaces = {_space_of(pid) for pid in mentioning([box])} - {"", _space_of("self")}
    return {_name_of(pid): pid for pid in os.listdir("/proc") if _space_of(pid) in spaces}


def _space_of(pid: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def _name_of(pid: str) -> str:
    with contextlib.suppress(OSError):
        return Path("/proc", pid, "comm").read_text(encoding="utf-8").strip()
    return ""


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
async def test_an_archive_that_leads_out_or_is_too_large_is_refused(
    members: tuple[tuple[str, str, str], ...], why: str, box_folder: Path, tmp_path: Path
) -> None:
    boxes = BoxHost(box_folder, 4096)
    (tmp_path / "a.tar").write_bytes(archive_of(*members))
    try:
        with open(tmp_path / "a.tar", "rb") as file, pytest.raises(BoxError, match=why):
            await boxes.unpack(file.fileno(), box_folder / "layers/bad", 1000, 10)
    finally:
        await boxes.remove(box_folder / "layers/bad")
        await boxes.close()
    assert not (box_folder / "layers/x").exists()
    assert not (box_folder / "layers/bad").exists()


async def test_a_second_name_of_a_link_is_unpacked(box_folder: Path, tmp_path: Path) -> None:
    boxes = BoxHost(box_folder, 4096)
    # The link's target is in another layer, or nowhere.
    (tmp_path / "a.tar").write_bytes(archive_of(("a", "link", "/etc/none"), ("b", "hard", "a"), mode=0o777))
    try:
        with open(tmp_path / "a.tar", "rb") as file:
            await boxes.unpack(file.fileno(), box_folder / "layers/links", 1000, 10)
        assert os.readlink(box_folder / "layers/links/b") == "/etc/none"
    finally:
        await boxes.remove(box_folder / "layers/links")
        await boxes.close()


def folders(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
    return folder


def test_a_walk_goes_into_what_it_is_told_to(tmp_path: Path) -> None:
    folders(tmp_path, "a/deep", "b")
    (tmp_path / "a/file").write_text("1")
    (tmp_path / "link").symlink_to("a")
    seen: list[tuple[str, bool]] = []
    with trees.opened(str(tmp_path)) as top:
        walk = trees.Walk(top)
        for entry in walk:
            seen.append((walk.path(entry.name), entry.left))
            if entry.is_folder and not entry.left and entry.name != "b":
                walk.enter()
    left = [("a/deep", False), ("a/deep", True), ("a/file", False), ("a", True)]
    assert seen == [("a", False), *left, ("b", False), ("link", False)]


@pytest.mark.parametrize("moved_to", ["top/elsewhere", "outside/elsewhere"])
def test_a_walk_beneath_which_folders_are_moved_stays_inside(moved_to: str, tmp_path: Path) -> None:
    folders(tmp_path, "top/a/b/c", "top/a/d", "top/e", "outside/secret")
    seen: list[str] = []
    with trees.opened(str(tmp_path / "top")) as top:
        walk = trees.Walk(top)
        for entry in walk:
            if entry.left:
                continue
            seen.append(entry.name)
            walk.enter()
            if entry.name == "c":
                (tmp_path / "top/a/b").rename(tmp_path / moved_to)
    assert seen == ["a", "b", "c", "d", "e"]


def test_a_large_tree_is_removed_and_no_link_followed(tmp_path: Path) -> None:
    folders(tmp_path, "tree/closed/in", "kept")
    (tmp_path / "kept/file").write_text("1")
    (tmp_path / "tree/closed/link").symlink_to(tmp_path / "kept")
    with trees.opened(str(tmp_path / "tree/closed/in")) as folder:
        for number in range(17_000):
            os.mknod(str(number), dir_fd=folder)
    (tmp_path / "tree/closed/in").chmod(0)
    trees.remove_tree(str(tmp_path / "tree"))
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "file"]


def test_what_cannot_be_removed_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path, "tree/a", "tree/b")
    for name in ("a/file", "a/held", "b/file"):
        (tmp_path / "tree" / name).touch()
    unlink = os.unlink

    def held(name: str, **settings: int) -> None:
        if name == "held":
            raise PermissionError
        unlink(name, **settings)

    monkeypatch.setattr(os, "unlink", held)
    trees.remove_tree(str(tmp_path / "tree"))
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["tree", "tree/a", "tree/a/held"]


def test_a_file_with_all_the_names_it_may_have_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path, "upper/app")
    (tmp_path / "upper/app/file").write_text("1")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    monkeypatch.setattr(os, "link", full)
    with trees.opened(str(tmp_path)) as box:
        assert layer_files.keep_only(box, ["/app"], [], 10) == ([], 0, True)
    assert (tmp_path / "kept/app/file").read_text() == "1"


def test_what_a_box_wrote_is_counted_in_pieces(tmp_path: Path) -> None:
    folders(tmp_path, "a", "b")
    for number in range(350):
        (tmp_path / "ab"[number % 2] / str(number)).write_text("1")
    with trees.opened(str(tmp_path)) as top:
        counted = list(layer_files.disk_use(top, 1 << 40, 1000))
        assert [files for _, files in counted] == [100, 200, 300, 352]
        assert counted[-1][0] >= 350
        assert [files for _, files in layer_files.disk_use(top, 1 << 40, 150)][-1] == 151
