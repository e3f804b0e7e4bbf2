"""rlinf commands run as child processes of another, which their failures and hangs must not affect."""

from __future__ import annotations

import sys
from typing import Final

# -P: nothing is imported from the working folder.
COMMAND: Final[tuple[str, ...]] = (sys.executable, "-P", "-m", "rlinf_cli")


def reason(errors: str, status: int) -> str:
    """Return in one line what such a command could not do and why, from its standard error and exit status."""
    lines = errors.strip().splitlines() or [f"exit status {status}"]
    why = next((line.strip().removeprefix("why: ") for line in lines if line.strip().startswith("why: ")), None)
    return lines[0].removeprefix("error: ") + (f": {why}" if why else "")
