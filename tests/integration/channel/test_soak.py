"""A job under constant change: mixed sizes and keys, and processes killed at random."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

_SCRIPT = Path(__file__).with_name("soak.py")
_ROOT = Path(__file__).parents[3]
MIB = 1 << 20


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a path that leaves room for unix sockets below it."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as name:
        yield Path(name)


def soak(seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    books, temporary = folder / "books", folder / "tmp"
    books.mkdir()
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), str(seconds), str(seed), str(books)],
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=seconds + 120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    # The guardian of the embedded Ray ends a moment after its driver, and is one of these processes.
    deadline = time.monotonic() + 10
    while (left := _processes_with(str(temporary))) and time.monotonic() < deadline:
        time.sleep(0.05)
    report["processes"] = left
    # But for the folder in which drivers make their own.
    report["left"] = [str(path) for path in temporary.rglob("*") if path.name != f"rlinf-{os.getuid()}"]
    return report


def _processes_with(folder: str) -> list[str]:
    """Return the processes that were given this temporary folder and still live."""
    result: list[str] = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if f"TMPDIR={folder}".encode() in (path / "environ").read_bytes():
                    result.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return result


def check_report(report: dict[str, Any]) -> None:
    # How much goes through and how often it kills depends on the machine; that some does, on us.
    assert report["accepted"] > 0
    assert report["kills"] > 0
    assert report["twice"] == []
    assert report["from nowhere"] == []
    assert report["although refused"] == []
    assert report["not taken"] == 0
    assert report["signed and not got"] == 0
    assert report["missing"] <= report["taken and not written down"] <= report["signed by the dead"]
    assert report["processes of channels"] == 0
    assert report["shared memory held here"] == 0
    memory: list[int] = report["memory"]
    third = max(1, len(memory) // 3)
    assert median(memory[-third:]) < median(memory[:third]) + 8 * MIB
    assert max(report["descriptors"][-3:]) <= max(report["descriptors"][:3]) + 12
    assert report["descriptors at the end"] <= report["descriptors"][0]
    assert [name for name in report["threads here"] if name.startswith(("rlinf-send", "rlinf-channel"))] == []
    assert report["left"] == []
    assert report["processes"] == []


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_30_seconds(short_folder: Path) -> None:
    check_report(soak(30, 1, short_folder))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_10_minutes(short_folder: Path) -> None:
    check_report(soak(600, int.from_bytes(os.urandom(4)), short_folder))
