"""Changes of the file system that leave the old or the new state when a process, or a machine, dies at any moment.

And the opening of files that others may have made.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

# What file systems say that know no locks.
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


def write_whole(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write `text` so that readers find the old file or the new one, and never a part.

    `mode` is that of a new file, before the process's umask.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_folder(path.parent)


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to read its bytes, where it is a regular one: a pipe or a device could make the reader wait for ever.

    Raises:
        OSError: it cannot be opened, or is none.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


@contextmanager
def claimed(path: Path) -> Generator[bool, None, None]:
    """Hold an exclusive lock on a file within the block; yield False where another process holds it.

    `write_whole` replaces the file: read it within the block. Where the file system has no locks everybody gets it.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield True
    finally:
        # Closing gives the lock back.
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Put every file below `folder`, and the names of them, on the disk itself."""
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync(Path(parent) / name)
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    """Put the names in `folder` on the disk itself, where its file system knows how."""
    try:
        _sync(folder)
    except OSError:
        # Some network file systems refuse this for folders; they order names by themselves.
        return


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name in its folder, for good."""
    os.rename(old, new)
    sync_folder(new.parent)


def keep_old(path: Path) -> None:
    """Give an earlier file of this name, if there is one, the first number that is free: `config.1.yaml`."""
    if path.exists():
        number = 1
        while (older := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        rename(path, older)


def remove_tree(folder: Path) -> None:
    """Remove a folder and what is in it; one that is gone already is fine."""
    shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
