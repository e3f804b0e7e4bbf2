"""The logs of a run: one file per process, merged by time, and followed as they grow."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rlinf_core.foreign.files import open_regular

# The timestamp that starts a log line; its text sorts by time.
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
_FILE = re.compile(r"rank_(\d+(?:_\d+)*)\.log")
_BLOCK = 64 * 1024
ALL = -1


class LogFile(NamedTuple):
    """The log of one process. `rank` is its rank; a child process adds its index, as in `0_1`."""

    component: str
    rank: str
    path: Path


class LogEntry(NamedTuple):
    """One log message: its first line and continuation lines."""

    moment: str
    lines: tuple[str, ...]


def log_files(folder: Path) -> list[LogFile]:
    """Return the logs in a run's `logs`, by component and rank."""
    files: list[LogFile] = []
    for path in folder.glob("*/rank_*.log"):
        match = _FILE.fullmatch(path.name)
        if match:
            files.append(LogFile(path.parent.name, match[1], path))
    return sorted(files, key=lambda file: (file.component, tuple(map(int, file.rank.split("_")))))


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last `count` lines of a text file, `ALL` for all; empty if it cannot be read."""
    lines, rest, _ = tail(path, count)
    if rest:
        lines.append(rest)
    return lines if count == ALL else lines[-count:] if count else []


def tail(path: Path, count: int) -> tuple[list[str], str, int]:
    """Return the last complete lines of a file, the incomplete rest, and the offset after the last complete line."""
    blocks: list[bytes] = []
    line_ends = 0
    try:
        with open_regular(path) as file:
            at = end = file.seek(0, 2)
            while at > 0 and (count == ALL or line_ends <= count):
                start = max(0, at - _BLOCK)
                file.seek(start)
                blocks.append(file.read(at - start))
                line_ends += blocks[-1].count(b"\n")
                at = start
    except OSError:
        return [], "", 0
    *lines, rest = b"".join(reversed(blocks)).split(b"\n")
    kept = lines if count == ALL else lines[-count:] if count else []
    return [_text(line) for line in kept], _text(rest), end - len(rest)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")


def entries(lines: Sequence[str], fallback: str = "") -> list[LogEntry]:
    """Group lines into messages: a line without a timestamp belongs to the message before it.

    Args:
        fallback: the timestamp of leading lines without one.
    """
    messages: list[LogEntry] = []
    moment, part = fallback, list[str]()
    for line in lines:
        match = _MOMENT.match(line)
        if match and part:
            messages.append(LogEntry(moment, tuple(part)))
            part = []
        moment = match[0] if match else moment
        part.append(line)
    return [*messages, LogEntry(moment, tuple(part))] if part else messages


def merged(parts: Iterable[Sequence[LogEntry]]) -> list[str]:
    """Return the lines of several logs by time; the order within a log is kept."""
    together = sorted((entry for part in parts for entry in part), key=lambda entry: entry.moment)
    return [line for entry in together for line in entry.lines]


def moment_of(path: Path) -> str:
    """Return a file's modification time in the loggers' format; empty if it is gone."""
    try:
        changed = path.stat().st_mtime
    except OSError:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed)) + f",{int(changed % 1 * 1000):03} "


class Follower:
    """A reader of the complete lines appended to a file.

    Args:
        at: the start offset in bytes.
    """

    def __init__(self, path: Path, at: int) -> None:
        self.path = path
        self._at = at
        self._rest = b""

    def read(self) -> list[str]:
        """Return the lines completed since the last call."""
        try:
            with open_regular(self.path) as file:
                if file.seek(0, 2) < self._at:
                    # The file was truncated.
                    self._at, self._rest = 0, b""
                file.seek(self._at)
                data = file.read()
        except OSError:
            return []
        self._at += len(data)
        *complete, self._rest = (self._rest + data).split(b"\n")
        return [_text(line) for line in complete]
