"""Boxes of tests: what runs in them, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from recipes.agent.boxes.box import Done, LiveBox
from recipes.agent.boxes.boxes import MIB, BoxHost, BoxLimits

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


def archive_of(*members: tuple[str, str, str]) -> bytes:
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
