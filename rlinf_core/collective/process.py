"""A check that another process of this host still lives, however its number is used again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of this host by number and start time."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        return cls(pid, _start_and_state(pid)[0])

    def is_dead(self) -> bool:
        """Return whether it is certainly gone: its memory is no longer mapped."""
        if not self.pid or not self.started:
            return False
        started, state = _start_and_state(self.pid)
        return started != self.started or state in ("Z", "X")


# Stands for a process that cannot be seen from here: it is never known to be dead.
NO_PROCESS = ProcessIdentity(0, "")


def _start_and_state(pid: int) -> tuple[str, str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", "X"
    # The name in parentheses may hold anything, also spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return fields[19], fields[0]
