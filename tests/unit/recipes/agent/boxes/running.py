"""Boxes of tests: what runs in them, and what is left.

As a program it is an owner of boxes whose commands would outlive it: it prints what it has, and waits to be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from recipes.agent.boxes.box import Done, LiveBox
from recipes.agent.boxes.boxes import MIB, BoxHost, BoxLimits
from recipes.agent.boxes.image_store import ImageStore

LIMITS = BoxLimits(memory=256 * MIB, processes=64, disk=64 * MIB)


@asynccontextmanager
async def one_box(folder: Path, limits: BoxLimits = LIMITS, **settings: Any) -> AsyncIterator[tuple[BoxHost, LiveBox]]:
    boxes = BoxHost(folder, 4096)
    try:
        layers = [*settings.pop("above", ()), folder / "layers/host"]
        async with boxes.box(layers, limits, **{"workdir": "/app", **settings}) as box:
            yield boxes, box
    finally:
        await boxes.close()


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


async def pids_of(box: LiveBox) -> list[str]:
    """Return the processes of the machine that are in the box."""
    task = asyncio.ensure_future(sh(box, f": {box.name}; sleep 600; true"))
    try:
        while True:
            pids = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if box.name in command_of(pid)]
            if pids:
                return pids
            await asyncio.sleep(0.01)
    finally:
        task.cancel()


def command_of(pid: str) -> str:
    with contextlib.suppress(OSError):
        return Path("/proc", pid, "cmdline").read_text(encoding="utf-8", errors="replace")
    return ""


def mentioning(names: list[str]) -> list[str]:
    return [pid for pid in filter(str.isdigit, os.listdir("/proc")) if any(name in command_of(pid) for name in names)]


def archive_of(*members: tuple[str, str, str], **facts: Any) -> bytes:
    """Return an archive of members, each with its name, its kind (`file`, `link` or `hard`) and its text or target."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, text in members:
            info = tarfile.TarInfo(name)
            for fact, value in facts.items():
                setattr(info, fact, value)
            if kind == "file":
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
            else:
                info.type = tarfile.SYMTYPE if kind == "link" else tarfile.LNKTYPE
                info.linkname = text
                archive.addfile(info)
    return buffer.getvalue()


@asynccontextmanager
async def stored(folder: Path) -> AsyncIterator[ImageStore]:
    """The images of a node."""
    boxes = BoxHost(folder, 4096)
    store = ImageStore(boxes)
    try:
        async with asyncio.timeout(100):
            yield store
    finally:
        store.close()
        await boxes.close()


def _holders(starter: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{starter}/task/{starter}/children").read_text().split()]


async def _own(folder: Path, number: int) -> None:
    boxes, names = BoxHost(folder, 4096), list[str]()
    async with AsyncExitStack() as stack:
        for _ in range(number):
            limits = BoxLimits(memory=128 * MIB)
            box = await stack.enter_async_context(boxes.box([folder / "layers/host"], limits, workdir="/app"))
            names.append(box.name)
            await sh(box, f"setsid bash -c ': {box.name}; trap \"\" TERM HUP INT; while true; do sleep 600; done' &")
        assert boxes._starter is not None
        starter = boxes._starter.pid
        print(json.dumps({"names": names, "starter": starter, "holders": _holders(starter)}), flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(_own(Path(sys.argv[1]), int(sys.argv[2])))
