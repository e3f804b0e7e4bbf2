"""The memory of this process's control group, as its kernel counts it."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

_ROOT: Final = Path("/sys/fs/cgroup")
_CONTROLLER: Final = "memory"


class GroupMemory(NamedTuple):
    """The memory of a control group.

    Attributes:
        path: its folder.
        used, limit, most: bytes now, allowed, and held at most; None where the kernel does not report it.
        kills: how many of its own processes, without groups below it, were killed for memory; None likewise.
    """

    path: str
    used: int | None
    limit: int | None
    most: int | None
    kills: int | None


def own_group(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> GroupMemory | None:
    """Return the memory of this process's control group; None where there is none but that of the whole machine."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if _CONTROLLER in controllers.split(","):
            # Version 1. In its root group the machine's own processes count.
            folder = root / _CONTROLLER / path.lstrip("/")
            if path != "/" and folder.is_dir():
                return GroupMemory(
                    str(folder),
                    _number(folder / "memory.usage_in_bytes"),
                    _number(folder / "memory.limit_in_bytes"),
                    _number(folder / "memory.max_usage_in_bytes"),
                    _field(folder / "memory.oom_control"),
                )
    for _, controllers, path in (line for line in lines if len(line) == 3):
        folder = root / path.lstrip("/")
        # Version 2. The root group of the machine lacks this file; that of a container has it.
        if not controllers and (folder / "memory.events").is_file():
            kills = _field(folder / "memory.events.local")
            return GroupMemory(
                str(folder),
                _number(folder / "memory.current"),
                _number(folder / "memory.max"),
                _number(folder / "memory.peak"),
                kills,
            )
    return None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str = "oom_kill") -> int | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    words = (text.split() for text in lines)
    return next((int(line[1]) for line in words if line[:1] == [name] and line[-1].isdigit()), None)
