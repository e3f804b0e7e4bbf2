"""The kernel's lines about processes, as far as this user may read them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from rlinf_core.process.proc import namespace

_FILE: Final = "/dev/kmsg"
_MOST_LINES: Final = 20_000
_RECORD: Final = 8192
# The inode of the first name space of pids, whose pids the kernel writes (include/linux/proc_ns.h).
_FIRST_NAMESPACE: Final = 0xEFFFFFFC
_NUMBER: Final = re.compile(r"\d+")
_KILL: Final = re.compile(r"[Oo]ut of memory.*: Kill(?:ed)? process (\d+)\b")


def kernel_lines(pids: Collection[int], since: float = 0.0, path: str = _FILE) -> list[str]:
    """Return the kernel's lines that name one of these pids, oldest first; none where they cannot be read.

    Args:
        pids: pids of this process's name space.
        since: the time in seconds since boot; earlier lines may be about other processes with these pids.
        path: the path of the kernel's log.
    """
    if not pids or namespace("pid") != _FIRST_NAMESPACE:
        return []
    wanted = {str(pid) for pid in pids}
    return [text for at, text in _lines(path) if at >= since and not wanted.isdisjoint(_NUMBER.findall(text))]


def memory_kill(pid: int, since: float = 0.0, path: str = _FILE) -> str | None:
    """Return the kernel's line of a kill of `pid` for lack of memory, or None."""
    kills = ((_KILL.search(line), line) for line in kernel_lines([pid], since, path))
    return next((line for match, line in kills if match is not None and int(match[1]) == pid), None)


def _lines(path: str) -> list[tuple[float, str]]:
    """Return the lines with their seconds since boot (Documentation/ABI/testing/dev-kmsg)."""
    lines: list[tuple[float, str]] = []
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return lines
    with suppress(OSError):  # no line is left
        try:
            while len(lines) < _MOST_LINES:
                try:
                    record = os.read(log, _RECORD)
                except BrokenPipeError:
                    continue  # a line was overwritten meanwhile
                if not record:
                    break
                lines += _decoded(record.decode("utf-8", "replace"))
        finally:
            os.close(log)
    return lines


def _decoded(record: str) -> list[tuple[float, str]]:
    head, _, text = record.partition(";")
    fields = head.split(",")
    if len(fields) < 3 or not fields[2].isdigit():
        return []
    return [(int(fields[2]) / 1e6, text.splitlines()[0])] if text.strip() else []
