"""The cause of death of a process on this node, from the end of its standard error and the kernel's count of OOM
kills."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TAIL_BYTES = 64 << 10
_LAST_LINES = 8
_FRAMES = 6
_CGROUPS = Path("/sys/fs/cgroup")
_FATAL = re.compile(r"^Fatal Python error: (.*)$")
_CURRENT_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+ .*most recent call first")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
# Frames that call user code: outer frames belong to rlinf and the engine.
_OUTERMOST = "/rlinf_core/worker/process.py"
# Lines of the engine, irrelevant for user code: Ray's markers, and its crash report.
_ENGINE = re.compile(r"^(:|\[\d{4}-|\*\*\* SIG|PC: @|    @ )")


def describe_end(log: str | None, memory_kills_before: int) -> str | None:
    """Return what is known about the end of a process on this node, in words, or None.

    Args:
        log: the file of its standard error.
        memory_kills_before: `memory_kills()` when it began.
    """
    parts: list[str] = []
    if memory_kills() > memory_kills_before:
        parts.append("the kernel killed a process there because it was out of memory")
    lines = _tail(log)
    crash = _crash(lines)
    if crash:
        parts.append(crash)
    else:
        last_lines = [line for line in lines if line.strip() and not _ENGINE.match(line)][-_LAST_LINES:]
        if last_lines:
            parts.append(_block("the last lines of its log", last_lines))
    return "; ".join(parts) or None


def own_log() -> str | None:
    """Return the file of this process's standard error, or None if it is not a file."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return None
    return path if path.startswith("/") and os.path.isfile(path) else None


def memory_kills() -> int:
    """Return the number of OOM kills in this control group, else on this machine."""
    for file in (_own_group() / "memory.events", Path("/proc/vmstat")):
        try:
            text = file.read_text(encoding="ascii")
        except OSError:
            continue
        for line in text.splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return 0


def _own_group() -> Path:
    try:
        line = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()[-1]
    except (OSError, IndexError):
        return _CGROUPS
    return _CGROUPS / line.rpartition(":")[2].lstrip("/")


def _tail(log: str | None) -> list[str]:
    if log is None:
        return []
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _crash(lines: list[str]) -> str | None:
    """Return faulthandler's report of a crash: the fault and the stack of its thread."""
    starts = [index for index, line in enumerate(lines) if _FATAL.match(line)]
    if not starts:
        return None
    rest = lines[starts[-1] :]
    frames: list[str] = []
    inside = False
    for line in rest:
        if _CURRENT_THREAD.match(line):
            inside = line.startswith("Current")
        elif inside and (frame := _FRAME.match(line)):
            if frame[1].endswith(_OUTERMOST):
                break
            frames.append(f"{frame[1]}:{frame[2]} in {frame[3]}")
        elif not line.strip() and frames:
            break
    fault = rest[0].partition(": ")[2]
    return _block(f"it crashed: {fault}; its stack, innermost call first", frames[:_FRAMES]) if frames else fault


def _block(title: str, lines: list[str]) -> str:
    return "\n".join((f"{title}:", *(f"    {line}" for line in lines)))
