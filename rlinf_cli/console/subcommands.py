"""Commands of rlinf that another of its commands runs, as processes of their own: these may fail and hang alone."""

from __future__ import annotations

import sys
from typing import Final

# -P: what lies in the working folder is not imported.
COMMAND: Final[tuple[str, ...]] = (sys.executable, "-P", "-m", "rlinf_cli")


def reason(errors: str, status: int) -> str:
    """Return in one line why such a command failed, from what it wrote to standard error and its exit status."""
    lines = errors.strip().splitlines() or [f"exit status {status}"]
    return lines[0].removeprefix("error: ")
