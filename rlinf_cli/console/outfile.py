"""Atomic writing of a file that the user named."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rlinf_core.errors import RLinfError


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` atomically.

    A link itself is replaced, not its target. Devices and pipes, such as /dev/stdout, are written to directly.

    Raises:
        RLinfError: it cannot be written.
    """
    from rlinf_core.foreign.files import write_fault
    from rlinf_core.runners.storage import durable

    try:
        if path.is_relative_to("/dev") or path.is_relative_to("/proc") or (path.exists() and not path.is_file()):
            # Fails for a folder, as it should.
            path.write_text(text, encoding="utf-8")
            return
        before = path.lstat().st_mode if os.path.lexists(path) else 0
        durable.write_whole(path, text, mode=before & 0o777 if stat.S_ISREG(before) else 0o666)
    except OSError as error:
        raise RLinfError(f"cannot write `{path}`", why=write_fault(path, error)) from error
