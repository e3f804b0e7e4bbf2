"""Freed memory: given back to the system, or kept for the next blocks."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from recipes.training.host_memory import release_host_memory
from rlinf_core.process.proc import rss_fields


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the resident set is read from /proc")
def test_freed_blocks_are_given_back() -> None:
    # Small ones, of which the allocator keeps those below the last: that lives on.
    blocks = [bytearray(64 * 1024) for _ in range(1024)]
    last = bytearray(64 * 1024)
    held = rss_fields()["VmRSS"]
    del blocks
    release_host_memory()
    assert held - rss_fields()["VmRSS"] > 32 * 2**20
    assert len(last) == 64 * 1024


# Page faults of blocks that are taken, written and freed together, five times.
PROGRAM = """
import ctypes
import resource
import sys

from recipes.training.host_memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    blocks = [ctypes.c_void_p(library.malloc(ctypes.c_size_t(20 * 2**20))) for _ in range(3)]
    for block in blocks:
        ctypes.memset(block, 1, 20 * 2**20)
    for block in blocks:
        library.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
def test_freed_blocks_are_used_again_without_page_faults() -> None:
    # The first time pages are new either way.
    assert 3 * faults("keep") < faults("leave")
