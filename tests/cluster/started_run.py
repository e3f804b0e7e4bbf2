"""A run on the hosts of a test, from its first file to the end of the test's block."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import until


@contextmanager
def started_run(
    process: subprocess.Popen[str], runs: Path, has_begun: Callable[[], bool], what: str, *, seconds: float
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Yield a `rlinf train` and its folder once it has begun, and end it after the block.

    Args:
        process: the command, whose output is a pipe.
        runs: the folder in which it makes its own.
        has_begun: whether there is what the test waits for.
        what: that in words.
        seconds: the longest wait.
    """
    try:
        until(lambda: process.poll() is not None or has_begun(), what, seconds=seconds)
        assert process.poll() is None, process.communicate()[0]
        (folder,) = runs.iterdir()
        yield process, folder
    finally:
        process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()
