"""The machine whose accelerators are searched for; tests replace its file system and its tools."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

# A driver that is being reset can hold its vendor's tool for minutes; the device files then answer instead.
TOOL_TIMEOUT_S = 10.0


def run_tool(command: Sequence[str]) -> str | None:
    """Return standard output of a vendor's tool, or None when it is missing, fails or takes longer than 10 s."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TOOL_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


class Host:
    """A machine, seen through its files and its vendors' tools."""

    def __init__(self, root: Path = Path("/"), run: Callable[[Sequence[str]], str | None] = run_tool) -> None:
        self._root = root
        self.run = run

    def exists(self, path: str) -> bool:
        return self._at(path).exists()

    def read(self, path: str) -> str | None:
        """Return the text of a file without surrounding blanks, or None when it cannot be read."""
        try:
            return self._at(path).read_text(errors="replace").strip()
        except OSError:
            return None

    def resolve(self, path: str) -> str:
        """Return the last name of what a link leads to: `0000:3a:00.0` for a device in sysfs."""
        return self._at(path).resolve().name

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, numbers in them ascending; empty when it cannot be read."""
        try:
            found = [path.name for path in self._at(folder).iterdir()]
        except OSError:
            return []
        return sorted(found, key=lambda name: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", name)])

    def numbered(self, folder: str, prefix: str) -> list[int]:
        """N of every `prefixN` in a folder, ascending."""
        pattern = re.compile(re.escape(prefix) + r"(\d+)\Z", re.ASCII)
        return sorted(int(match[1]) for name in self.names(folder) if (match := pattern.match(name)))

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")
