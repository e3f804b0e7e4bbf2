"""How a worker died, from what it left behind, and from what Ray or the host of forked processes says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf_core.supervision.deaths import describe_death, exit_reason

CRASH = """\
:actor_name:env
something printed before
[2026-11-21 04:21:36,679 E 14178 14178] logging.cc:474: *** SIGSEGV received
Fatal Python error: Segmentation fault

Thread 0x00007f87 (most recent call first):
  File "/lib/threading.py", line 982 in run

Current thread 0x00007f88 (most recent call first):
  File "/lib/ctypes/__init__.py", line 519 in string_at
  File "/home/me/env.py", line 13 in step
  File "/site/rlinf_core/worker/process.py", line 145 in call
  File "/site/ray/worker.py", line 1 in main_loop

Extension modules: a, b (total: 2)
"""


def test_a_crash_is_told_with_the_users_part_of_the_stack(tmp_path: Path) -> None:
    log = tmp_path / "err"
    log.write_text(CRASH)
    assert exit_reason(str(log)) == (
        "it crashed: Segmentation fault; its stack, innermost call first:\n"
        "    /lib/ctypes/__init__.py:519 in string_at\n"
        "    /home/me/env.py:13 in step"
    )


def test_else_the_last_lines_are_told_without_the_engines(tmp_path: Path) -> None:
    log = tmp_path / "err"
    log.write_text(":actor_name:env\n" + "".join(f"line {n}\n" for n in range(20)) + "[2026-01-01 E] logging.cc\n")
    output = exit_reason(str(log))
    assert output is not None
    assert output.splitlines() == ["the last lines of its log:", *(f"    line {n}" for n in range(12, 20))]


def test_nothing_is_made_up(tmp_path: Path) -> None:
    (tmp_path / "err").write_text(":job_id:01\n")
    assert exit_reason(str(tmp_path / "err")) is None
    assert exit_reason(str(tmp_path / "missing")) is None
    assert exit_reason(None) is None


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
    error = describe_death(None, RuntimeError(said), "actor:1", "node 0", 0)
    assert words in str(error)
    assert (error.end.signal if error.end else None) == signal
