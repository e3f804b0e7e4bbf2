"""Stacks of other processes of this machine, those that answer nothing included, and of the processes they started.

py-spy reads them from outside, native frames too, and may need rights; else a handler of the process writes them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from rlinf_core.node.process_end import has_ended
from rlinf_core.node.process_identity import ProcessIdentity, UnprovenProcessError, identity_here, opened
from rlinf_core.node.stacks import stack_signal
from rlinf_core.node.stacks.stack_signal import NoAnswerError
from rlinf_core.node.stacks.stack_text import ThreadStack, of_interest, spell, threads_of_spy
from rlinf_core.process.proc import command, pids, spell_command, stat
from rlinf_core.process.requirements import install_command

# How long one process may take.
SECONDS: Final = 2.0
_AT_ONCE: Final = 8
NOT_PYTHON: Final = "it does not run Python"
_MOST_CHILDREN: Final = 256
_MOST_COMMAND: Final = 120
# Of what py-spy prints, the line that says why.
_REASON: Final = ("Error: ", "Reason: ")
_ENGINE: Final = b"ray::"


class ProcessStacks(NamedTuple):
    """The stacks of one process, or why there are none.

    Attributes:
        pid: its process id.
        parent: the pid of the process that started it; 0 for one that was named.
        command: how it was started, shortened.
        source: `py-spy`, `signal`, or empty without stacks.
        stacks: the stacks of its threads, as text.
        reason: why there are no stacks, or no native ones; else empty.
    """

    pid: int
    parent: int
    command: str
    source: str
    stacks: str
    reason: str


def install_spy() -> str:
    """Return the command that installs py-spy for this interpreter."""
    return install_command("py_spy")


class StackRequest(NamedTuple):
    """A request for stacks.

    Attributes:
        process: the process whose stacks, and those of the processes that it started, are wanted.
        own: whether its own are wanted too.
        native: whether native frames are.
        others: pids that are asked for themselves.
    """

    process: ProcessIdentity
    own: bool
    native: bool
    others: tuple[int, ...] = ()


def py_spy() -> str | None:
    """Return the path of py-spy beside this interpreter or in PATH; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def read_stacks(request: StackRequest, seconds: float = SECONDS) -> list[ProcessStacks]:
    """Return the stacks of a process of this machine and of those that it started, read side by side.

    Raises:
        UnprovenProcessError: it cannot be identified with certainty.
        OSError: it has ended.
    """
    with opened(request.process):
        wanted = [(request.process, 0)] if request.own else []
        for pid, parent in children_of(request.process.pid, request.others):
            try:
                wanted.append((identity_here(pid), parent))
            except ProcessLookupError:
                continue
            if stat(pid).parent != parent:
                wanted.pop()  # it has ended, and its pid is another one's
    if not wanted:
        return []
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="rlinf-stacks") as pool:
        reading = [pool.submit(_read, process, parent, request.native, seconds) for process, parent in wanted]
        return [read.result() for read in reading]


def children_of(pid: int, others: Collection[int] = ()) -> Iterator[tuple[int, int]]:
    """Yield the living processes that one has started, directly or not, each with its parent.

    `others` and processes of Ray are left out, with what they started.
    """
    by_parent: dict[int, list[int]] = {}
    for one in pids():
        by_parent.setdefault(stat(one).parent, []).append(one)
    level, count = [pid], 0
    while level:
        parent = level.pop(0)
        for child in sorted(by_parent.get(parent, ())):
            if child in others or child == os.getpid() or command(child).startswith(_ENGINE) or count >= _MOST_CHILDREN:
                continue
            count += 1
            level.append(child)
            yield child, parent


def _read(process: ProcessIdentity, parent: int, native: bool, seconds: float) -> ProcessStacks:
    deadline = time.monotonic() + seconds
    shown = spell_command(process.pid)[:_MOST_COMMAND]
    reasons: list[str] = []
    sources = (("py-spy", _spied), ("signal", _signalled))
    for source, read in sources:
        try:
            threads = read(process, native and source == "py-spy", max(0.1, deadline - time.monotonic()))
        except ProcessLookupError:
            return ProcessStacks(process.pid, parent, shown, "", "", "it has ended")
        except (NoAnswerError, UnprovenProcessError, ValueError) as error:
            reasons.append(str(error))
        except OSError as error:
            reasons.append(f"{source}: {error.strerror or error}")
        else:
            missing = "; ".join(reasons) if native and source != "py-spy" else ""
            text = spell(threads if native else of_interest(threads))
            return ProcessStacks(process.pid, parent, shown, source, text, missing)
    if not _is_python(process.pid):
        reasons = [NOT_PYTHON]
    return ProcessStacks(process.pid, parent, shown, "", "", "; ".join(reasons))


def _spied(process: ProcessIdentity, native: bool, seconds: float) -> list[ThreadStack]:
    """Read a process from outside.

    Raises: as `stack_signal.ask`; `ValueError` if py-spy prints no report.
    """
    program = py_spy()
    if program is None:
        raise NoAnswerError(f"py-spy is not installed: `{install_spy()}`")
    words = [program, "dump", "--json", "--pid", str(process.pid), *(["--native"] if native else [])]
    with opened(process) as handle:
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise NoAnswerError(f"py-spy did not end within {seconds:.1f} s") from None
        if has_ended(handle):
            raise ProcessLookupError
    if done.returncode != 0:
        raise NoAnswerError(f"py-spy: {_why(done.stderr)}")
    return threads_of_spy(json.loads(done.stdout))


def _signalled(process: ProcessIdentity, native: bool, seconds: float) -> Sequence[ThreadStack]:
    return stack_signal.ask(process, seconds)


def _why(printed: str) -> str:
    """Return the reason in what py-spy printed: its innermost one."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    named = [line.partition(": ")[2] for line in lines if line.startswith(_REASON)]
    return (named or lines or ["it failed without a word"])[-1]


def _is_python(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return any("python" in line.rpartition("/")[2] for line in file)
    except OSError:
        return True
