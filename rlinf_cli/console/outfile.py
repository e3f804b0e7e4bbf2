"""Writing a file that the user named: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from rlinf_core.errors import RLinfError


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, replacing what is there only when all of it has been written.

    Raises:
        RLinfError: it cannot be written.
    """
    import tempfile

    try:
        if path.exists() and not path.is_file():
            # A device or a pipe is written to, never replaced. A folder fails here, as it should.
            path.write_text(text, encoding="utf-8")
            return
        target = path.resolve()
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            # A temporary file is private; the user's file has the usual mode.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~mask)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise RLinfError(f"cannot write `{path}`", why=error.strerror or str(error)) from error
