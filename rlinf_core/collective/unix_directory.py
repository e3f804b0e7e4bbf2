"""The directory of unix sockets: only this user enters it, and it is gone with its process however that ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "rlinf-"
# The kernel's limit is 107 bytes; some systems have less.
LONGEST_PATH = 90


class UnixDirectory:
    """A private directory for the sockets of one process.

    A lock is held on it for as long as the process lives; the next one to come removes those whose lock is free.
    """

    def __init__(self, base: str | None = None) -> None:
        base = base if base is not None and len(base) <= LONGEST_PATH - 40 else tempfile.gettempdir()
        if len(base) > LONGEST_PATH - 40:
            base = "/tmp"
        reap(Path(base))
        self._pid = os.getpid()
        self._lock = -1
        while self._lock < 0:
            self._make(base)

    def _make(self, base: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-", dir=base))  # mkdtemp makes it 0700
        try:
            lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # another process took it for left behind, before it was locked
        fcntl.flock(lock, fcntl.LOCK_EX)
        if self.path.is_dir():
            self._lock = lock
        else:
            os.close(lock)  # as above

    def close(self) -> None:
        """Remove the directory, if this process made it."""
        if self._lock < 0:
            return
        if self._pid == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def reap(base: Path) -> None:
    """Remove what killed processes of this user left in `base`."""
    for directory in base.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid == os.getuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            continue  # its process lives
        finally:
            os.close(fd)
