"""The memory that this process may still allocate, by its control group and by the machine.

Shared memory beyond a control group's limit raises no error: the kernel kills the process. So check first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlinf_core.process import proc

_RESERVE = 64 << 20
UNLIMITED = 1 << 60
_LARGEST_DEFAULT = 2 << 30


def default_arena_bytes(root: Path = Path("/")) -> int:
    """Return an eighth of `allowed_bytes`, at most 2 GiB and at least 64 MiB, rounded down to whole pages."""
    return max(64 << 20, min(_LARGEST_DEFAULT, allowed_bytes(root) // 8)) & ~0xFFF


def allowed_bytes(root: Path = Path("/")) -> int:
    """Return the memory of the machine or the tightest limit of this process's control groups, whichever is less."""
    return min([_machine(root, "MemTotal"), *(limit for limit, _ in _groups(root))])


def free_bytes(root: Path = Path("/")) -> int:
    """Return how many bytes may be allocated now: the free memory of machine and control groups, less 64 MiB."""
    return max(0, min([_machine(root, "MemAvailable"), *(limit - used for limit, used in _groups(root))]) - _RESERVE)


def _machine(root: Path, name: str) -> int:
    size = proc.fields(str(root / "proc/meminfo")).get(name)
    return int(size.removesuffix("kB")) << 10 if size else UNLIMITED


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, use without droppable cache) in bytes of every limited memory control group of this process."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if not controllers:
            yield from _ancestors(base, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _ancestors(base / "memory", path, *files)


def _ancestors(base: Path, path: str, limit: str, used: str, cache: str) -> Iterator[tuple[int, int]]:
    group = base / path.lstrip("/")
    # Inside a container the path may be the host's; then the container's own group is mounted at the base.
    if not group.is_dir():
        group = base
    while True:
        pair = _limit_and_use(group, limit, used, cache)
        if pair is not None:
            yield pair
        if group == base:
            return
        group = group.parent


def _limit_and_use(group: Path, limit: str, used: str, cache: str) -> tuple[int, int] | None:
    try:
        most = int((group / limit).read_text())
        now = int((group / used).read_text())
        statistics = (group / "memory.stat").read_text()
    except (OSError, ValueError):
        return None  # no such group, or "max"
    if most >= UNLIMITED:
        return None
    droppable = next((int(line.split()[1]) for line in statistics.splitlines() if line.startswith(f"{cache} ")), 0)
    return most, max(0, now - droppable)
