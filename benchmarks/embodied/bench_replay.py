"""A replay buffer of images in files: batches in terms of those from memory.

    python -m benchmarks.embodied.bench_replay [--gib 10] [--memory-gib 2] [--image 128] [--batch 256] [--folder FOLDER]

One buffer of `--gib` GiB has its observations in files, another of `--memory-gib` GiB is all in memory. Batches of both
are drawn by turns. They are read from the file as the kernel finds it, partly in its cache. Every image is checked to
be the one that was stored. Memory is anonymous memory (`RssAnon`); pages of the file that the kernel caches are not
counted: it gives them up where memory is short.
Exits with 1 where batches from files come at less than 0.8 times the speed, or the process takes memory for them.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.table import Result, run_parts
from recipes.embodied.off_policy.buffer import ReplayBuffer
from recipes.embodied.off_policy.storage import Transitions, TransitionSpec

LANES, ACTION, EPISODE = 16, 7, 200
GOAL = 0.8
# Python and its allocator keep some memory besides.
SLACK = 64 * 2**20
# Batches of each buffer, by turns.
BATCHES = 500


class Setting(NamedTuple):
    """The sizes of one comparison, in GiB, pixels and transitions."""

    gib: float
    memory_gib: float
    image: int
    batch: int
    folder: Path

    @property
    def spec(self) -> TransitionSpec:
        observed = {"images.main": ((self.image, self.image, 3), "uint8"), "states": ((7,), "float32")}
        return TransitionSpec.of(observed, (ACTION, "float32"))

    def rows(self, gib: float) -> int:
        """Return how many rows of all environments are in that many GiB."""
        return int(gib * 2**30) // self.spec.row_bytes // LANES * LANES


def filled(setting: Setting, gib: float, storage: Path | None = None) -> ReplayBuffer:
    """Return a buffer whose every row was written to; the state of a step is the number that its image begins with."""
    buffer = ReplayBuffer(setting.spec, LANES, setting.rows(gib), storage)
    noise = np.random.default_rng(0).integers(0, 256, (LANES, setting.image, setting.image, 3), dtype=np.uint8)

    def observed(step: int) -> dict[str, Any]:
        numbers = (np.arange(LANES) + LANES * step).astype(np.uint32)
        images = noise.copy()
        images.reshape(LANES, -1)[:, :4] = numbers.view(np.uint8).reshape(LANES, 4)
        return {"images.main": images, "states": np.repeat(numbers[:, None], 7, axis=1).astype(np.float32)}

    following = observed(0)
    for step in range(buffer.rows_of_lane):
        present, following = following, observed(step + 1)
        ended = np.full(LANES, step % EPISODE == EPISODE - 1)
        actions = np.zeros((LANES, ACTION), np.float32)
        buffer.add(Transitions(present, actions, np.ones(LANES, np.float32), ended, ~ended & False, following))
    return buffer


class Took(NamedTuple):
    """Seconds that one batch took."""

    cpu: float
    wall: float


def timed(buffer: ReplayBuffer, setting: Setting, random: np.random.Generator) -> Took:
    """Return how long one batch takes, and check its images."""
    cpu, wall = time.thread_time(), time.perf_counter()
    batch = buffer.gather(buffer.sample(setting.batch, random), 1, 0.99)
    took = Took(time.thread_time() - cpu, time.perf_counter() - wall)
    for observed in (batch.observations, batch.next_observations):
        first = np.ascontiguousarray(observed["images.main"].reshape(len(batch), -1)[:, :4])
        if not np.array_equal(first.view(np.uint32)[:, 0], observed["states"][:, 0]):
            raise SystemExit("a batch holds an image that does not belong to its state")
    return took


def own(file: str, name: str) -> int:
    """Return a figure that the kernel tells of this process, by file in /proc/self and name."""
    match = re.search(rf"^{name}:\s+(\d+)", Path("/proc/self", file).read_text(encoding="ascii"), re.MULTILINE)
    return int(match[1]) if match else 0


def compare(setting: Setting) -> Iterator[Result]:
    """Compare batches of both buffers."""
    before = own("status", "RssAnon")
    stored = filled(setting, setting.gib, setting.folder)
    taken = (own("status", "RssAnon") - before) * 1024
    rest = stored.nbytes
    yield Result(
        f"memory of a buffer of {setting.gib:g} GiB",
        f"anonymous memory of the process; {stored.stored / 2**30:.2f} GiB in files,"
        f" {own('status', 'RssFile') // 1024} MiB of files mapped",
        f"{taken / 2**30:.2f} GiB",
        f"<= {(rest + SLACK) / 2**30:.2f} GiB",
        taken <= rest + SLACK,
    )
    plain = filled(setting, setting.memory_gib)
    random, read = np.random.default_rng(1), own("io", "read_bytes")
    times = [(timed(plain, setting, random), timed(stored, setting, random)) for _ in range(BATCHES)]
    read = (own("io", "read_bytes") - read) // 2**20
    yield speed(f"batches of {setting.batch}, {setting.image} px, {read} MiB of them from the disk", times, GOAL)


def speed(what: str, times: list[tuple[Took, Took]], goal: float | None) -> Result:
    """Return the speed of batches from files by that of batches from memory, by their medians.

    Where the cache has the rows CPU time counts, which a busy machine leaves alone; else the time that passes.
    """
    kind = "wall" if goal is None else "cpu"
    memory, stored = (
        {name: 1000 * statistics.median(getattr(took, name) for took in column) for name in Took._fields}
        for column in zip(*times, strict=True)
    )
    ratio = memory[kind] / stored[kind]
    said = (
        f"{stored['cpu']:.1f} cpu-ms a batch ({stored['wall']:.1f} ms), from memory {memory['cpu']:.1f}"
        f" ({memory['wall']:.1f} ms); load {os.getloadavg()[0]:.1f}"
    )
    return Result(what, said, f"{ratio:.2f}x", "-" if goal is None else f">= {goal}x", goal is None or ratio >= goal)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=10.0)
    parser.add_argument("--memory-gib", type=float, default=2.0)
    parser.add_argument("--image", type=int, default=128, help="pixels of a side")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=None, help="on a disk; by default a new one in the present one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder or Path.cwd()) as folder:
        setting = Setting(args.gib, args.memory_gib, args.image, args.batch, Path(folder))
        return run_parts({"stored": lambda: compare(setting)}, None)


if __name__ == "__main__":
    sys.exit(main())
