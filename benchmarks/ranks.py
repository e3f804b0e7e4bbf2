"""Ranks that train together, a process each, and their peaks of memory."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Phases:
    """Peaks of the resident set of this process.

    Attributes:
        peaks: the peaks in bytes, by phase, less what was held at the start.
        seconds: the seconds that each phase took.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self._base = _status("VmRSS")

    @contextmanager
    def phase(self, name: str) -> Generator[None, None, None]:
        """Measure what is done in here."""
        Path("/proc/self/clear_refs").write_text("5")
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began
        self.peaks[name] = _status("VmHWM") - self._base


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def run_ranks(python: str, program: Path, words: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Run a program as `count` ranks, and return what each wrote into `FOLDER/RANK.json`.

    The program gets `words` and `--ranks COUNT --folder FOLDER --rank RANK`.

    Raises:
        RuntimeError: one of them failed.
    """
    with tempfile.TemporaryDirectory() as name:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        # Memory is given back as soon as it is free, so that a peak is what is held.
        environment |= {"MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_MMAP_THRESHOLD_": "1048576"}
        root = str(Path(__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        command = [python, str(program), "--ranks", str(count), "--folder", name]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank), *words], env=environment, stderr=subprocess.PIPE, text=True
            )
            for rank in range(count)
        ]
        try:
            complaints = [rank.communicate(timeout=1700)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(rank.returncode for rank in ranks):
            raise RuntimeError("".join(complaints))
        return [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(count)]


def fitted(peaks: dict[int, float]) -> tuple[float, float]:
    """Return a and b of peak(n) = a + b / n, by least squares."""
    inverse = {count: 1 / count for count in peaks}
    x, y = sum(inverse.values()) / len(peaks), sum(peaks.values()) / len(peaks)
    spread = sum((share - x) ** 2 for share in inverse.values())
    slope = sum((inverse[count] - x) * (peak - y) for count, peak in peaks.items()) / spread if spread else 0.0
    return y - slope * x, slope
