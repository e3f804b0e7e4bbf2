"""The cause of a worker's death, from what Ray or the host of forked processes says."""

from __future__ import annotations

import pytest

from rlinf_core.worker.death import describe_death


@pytest.mark.parametrize(
    ("said", "signal", "words"),
    [
        ("exit code -9", "SIGKILL", "it was killed by SIGKILL"),
        ("Worker unexpectedly exits with exit code -11.", "SIGSEGV", "it was killed by SIGSEGV"),
        ("exit code -1000", "signal 1000", "it was killed by signal 1000"),
        ("exit code 3", None, "it ended with exit code 3"),
        ("the node was running low on memory; exit code -9", None, "its node ran out of memory"),
        ("its process is gone: exit code 1 of another", None, "its process is gone"),
    ],
)
def test_an_exit_code_is_told_in_words(said: str, signal: str | None, words: str) -> None:
    error = describe_death(RuntimeError(said), "actor:1", "node 0", 0)
    assert words in str(error)
    assert (error.end.signal if error.end else None) == signal
