"""The last words of a process on this node, from the end of its standard error."""

from __future__ import annotations

import os
import re

from rlinf_core.process.proc import tail

_TAIL_BYTES = 64 << 10
_LAST_LINES = 8
_FRAMES = 6
_FATAL = re.compile(r"^Fatal Python error: (.*)$")
_CURRENT_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+ .*most recent call first")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
# Frames that call user code: outer frames belong to rlinf and the engine.
_OUTERMOST = "/rlinf_core/worker/process.py"
# Lines of the engine, irrelevant for user code: Ray's markers, and its crash report.
_ENGINE = re.compile(r"^(:|\[\d{4}-|\*\*\* SIG|PC: @|    @ )")


def describe_end(log: str | None) -> str | None:
    """Return what a process on this node left in the file of its standard error, `log`, in words, or None."""
    lines = tail(log, _TAIL_BYTES).splitlines() if log is not None else []
    crash = _crash(lines)
    if crash:
        return crash
    last_lines = [line for line in lines if line.strip() and not _ENGINE.match(line)][-_LAST_LINES:]
    return _block("the last lines of its log", last_lines) if last_lines else None


def own_log() -> str | None:
    """Return the file of this process's standard error, or None if it is not a file."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return None
    return path if path.startswith("/") and os.path.isfile(path) else None


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
