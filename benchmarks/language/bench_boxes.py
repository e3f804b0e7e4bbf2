"""Boxes of tasks with images: their start, their cost, grades under load, limits, what killed owners leave, admission.

    python -m benchmarks.language.bench_boxes [--only PART] [--boxes 100] [--times 10] [--folder FOLDER]

FOLDER is on a disk, by default one of temporary files; its boxes have this machine's own shell and Python. Parts:
start, honest, bomb, killed, nodes. `killed` starts about 50 runs of `rlinf train`; `nodes` simulates 50 nodes of 8
agent processes by the locks that admit boxes, all in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from benchmarks.language.killed_runs import below, killed
from benchmarks.table import Result, run_parts
from recipes.agent.boxes.box import BoxEnded, LiveBox
from recipes.agent.boxes.box_limits import BoxMemory
from recipes.agent.boxes.boxes import MIB, BoxHost, BoxLimits
from recipes.agent.boxes.image_building import image_of
from recipes.agent.boxes.image_store import ImageStore
from recipes.agent.harbor.grading import check_task, files_of, finish, grade, task_box
from recipes.agent.harbor.task_folder import find_tasks, read_task

TASKS = Path(__file__).parents[2] / "examples/terminal_tasks"
LIMITS = BoxLimits(memory=256 * MIB)


@asynccontextmanager
async def host(folder: Path) -> AsyncGenerator[ImageStore]:
    """Yield a store of images, and end its boxes."""
    store = ImageStore(BoxHost(folder, 1 << 20))
    try:
        yield store
    finally:
        store.close()
        await store.boxes.close()


def start(folder: Path, boxes: int) -> Iterable[Result]:
    """Start many boxes at once, and run a command in each."""

    async def run() -> tuple[float, list[float], float, float]:
        async with host(folder) as store, AsyncExitStack() as stack:
            layers = store.layers(await store.base("rlinf/host"))
            began = time.perf_counter()
            opened = [stack.enter_async_context(store.boxes.box(layers, LIMITS)) for _ in range(boxes)]
            live = await asyncio.gather(*opened)
            seconds = time.perf_counter() - began
            times: list[float] = []
            for box in live:
                began = time.perf_counter()
                await box.run(["true"], timeout=60)
                times.append(time.perf_counter() - began)
            disk = sum(path.lstat().st_blocks * 512 for path in (folder / "live").rglob("*") if not path.is_symlink())
            return seconds, times, _pss() / boxes, disk / boxes

    seconds, times, memory, disk = asyncio.run(run())
    median = 1000 * statistics.median(times)
    yield Result(
        f"Start of {boxes} boxes at once",
        f"load {os.getloadavg()[0]:.1f}",
        f"{seconds:.1f} s",
        "<= 15 s",
        seconds <= 15,
    )
    yield Result("A command, median", f"of {boxes}, one after another", f"{median:.1f} ms", "<= 15 ms", median <= 15)
    yield Result(
        "Memory of a box (PSS)", "its two processes", f"{memory / MIB:.1f} MiB", "<= 12 MiB", memory <= 12 * MIB
    )
    yield Result("Disk of a box", "", f"{disk / 1024:.0f} KiB", "<= 100 KiB", disk <= 100 * 1024)


def _pss() -> int:
    """Return the memory of this process's boxes, without those of other programs."""
    total = 0
    for pid, process in below(os.getpid()).items():
        with suppress(OSError, StopIteration):
            if process.name.startswith("rlinf-box"):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
                total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def honest(folder: Path, times: int) -> Iterable[Result]:
    """Grade the solution of tasks, 20 at once."""

    async def run() -> list[float]:
        rewards: list[float] = []
        async with host(folder) as store:
            tasks = [read_task(path) for path in find_tasks(TASKS)]
            known = [
                (task, await image_of(store, task.environment, None, seconds=60), await check_task(store, task))
                for task in tasks
            ]
            turn = asyncio.Semaphore(20)

            async def one(number: int) -> None:
                task, image, checked = known[number % len(known)]
                async with turn, task_box(store, task, image) as box:
                    await box.put_files(files_of(task.path / "solution"), "/solution")
                    await box.run(["bash", "/solution/solve.sh"], timeout=task.agent_seconds)
                    await finish(task, image, box, checked.mode)
                    result = await grade(store, task, image, store.boxes.kept(box), checked.expected)
                    rewards.append(result.reward)

            await asyncio.gather(*(one(number) for number in range(10 * times)))
        return rewards

    began = time.perf_counter()
    rewards = asyncio.run(run())
    right = sum(reward == 1 for reward in rewards)
    seconds = f"{time.perf_counter() - began:.1f} s, load {os.getloadavg()[0]:.1f}"
    yield Result("Honest solutions graded 1, 20 at once", seconds, str(right), str(len(rewards)), right == len(rewards))


def bomb(folder: Path) -> Iterable[Result]:
    """Take more memory than a box may have, beside a neighbour."""
    take = "import time\nheld = []\nwhile True: held.append(bytearray(b'x' * (4 << 20))); time.sleep(0.002)"

    async def neighbour(box: LiveBox, times: list[float]) -> None:
        while True:
            began = time.perf_counter()
            await box.run(["true"], timeout=60)
            times.append(time.perf_counter() - began)
            await asyncio.sleep(0.02)

    async def run() -> tuple[bool, float, list[float], str]:
        times: list[float] = []
        limits = BoxLimits(memory=200 * MIB)
        async with host(folder) as store:
            layers = store.layers(await store.base("rlinf/host"))
            async with store.boxes.box(layers, limits) as quiet, store.boxes.box(layers, limits) as box:
                beside, ended = asyncio.create_task(neighbour(quiet, times)), ""
                for script in (take, "import os\nwhile True: os.fork()"):
                    with suppress(BoxEnded):
                        await box.run(["python3", "-c", script], timeout=5)
                ended = box.over
                left = await box.finish()
                beside.cancel()
            return store.boxes.bounds_memory, left.peak / MIB, times, ended

    bounded, peak, times, ended = asyncio.run(run())
    median = 1000 * statistics.median(times)
    how = "a control group" if bounded else "looked at five times a second: no group is delegated"
    yield Result(
        "Memory bomb at 200 MiB, its peak",
        how,
        f"{peak:.0f} MiB",
        "<= 210 MiB" if bounded else "",
        peak <= 210 or not bounded,
    )
    yield Result("A neighbour's command meanwhile, median", ended, f"{median:.0f} ms", "<= 100 ms", median <= 100)


def nodes(folder: Path) -> Iterable[Result]:
    """Admit 1,000 boxes of 50 nodes, 8 agent processes each, by the locks that admit boxes."""
    count, processes, memory = 50, 8, 8192
    draws = random.Random(0)
    held, most, waits = [0] * count, [0] * count, list[tuple[int, float]]()

    async def one(node: int, admission: BoxMemory, size: int, seconds: float) -> None:
        began = time.perf_counter()
        async with admission.admit(size):
            waits.append((size, time.perf_counter() - began))
            held[node] += size
            most[node] = max(most[node], held[node])
            await asyncio.sleep(seconds)
            held[node] -= size

    async def run() -> float:
        doors = [[BoxMemory(folder / f"node{node}", memory) for _ in range(processes)] for node in range(count)]
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in range(1000):
                node = number % count
                size = draws.choice((512, 1024, 2048, 4096))
                seconds = draws.uniform(0.5, 1.5)
                tasks.create_task(one(node, doors[node][number // count % processes], size, seconds))
        return time.perf_counter() - began

    seconds = asyncio.run(run())
    large = statistics.fmean(wait for size, wait in waits if size == 4096)
    small = statistics.fmean(wait for size, wait in waits if size == 512)
    over = sum(held_most > memory for held_most in most)
    yield Result(
        "1,000 boxes over 50 nodes of 8 GiB",
        f"longest wait {max(w for _, w in waits):.1f} s",
        f"{seconds:.1f} s",
        "",
        True,
    )
    yield Result("Nodes over their memory", f"most {max(most)} of {memory} MiB", str(over), "0", over == 0)
    figure, measured = large / small, f"{large:.2f} s and {small:.2f} s"
    yield Result("Mean wait, boxes of 4 GiB against 512 MiB", measured, f"{figure:.2f}x", "<= 2.0x", figure <= 2)


def main() -> int:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("start", "honest", "bomb", "killed", "nodes"))
    parser.add_argument("--boxes", type=int, default=100)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no further run is killed after them")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as made:
        folder = Path(made)
        parts = {
            "start": partial(start, folder, asked.boxes),
            "honest": partial(honest, folder, asked.times),
            "bomb": partial(bomb, folder),
            "killed": partial(killed, folder, asked.times, asked.seconds),
            "nodes": partial(nodes, folder),
        }
        return run_parts(parts, asked.only)


if __name__ == "__main__":
    sys.exit(main())
