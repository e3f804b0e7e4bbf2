"""Changes of the file system that leave the old or the new state when a process, or a machine, dies at any moment.

And the opening of files that others may have made.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from rlinf_core.foreign.files import create_aside, open_below

# What file systems say that know no locks.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Write a file so that readers find the old one or the new one, and never a part.

    A link of this name is replaced, and what it leads to stays as it is. Whatever writes a whole file into the folder
    of a run uses this.

    Args:
        path: of the file.
        content: its bytes, or its text, which becomes UTF-8.
        mode: of the file, before the process's umask.

    Raises:
        OSError: it cannot be written; nothing is left of the attempt.
    """
    descriptor, part = create_aside(path, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise
    sync_folder(path.parent)


def write_short(path: Path, text: str) -> None:
    """Write a short file as `write_whole`, and where the disk is full over the old one, whose room it has.

    A machine that goes down at that very moment may leave a part; a file that tells nothing of the end would be worse.

    Raises:
        OSError: it cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        if error.errno not in _FULL or not os.path.exists(path):
            raise
        content = text.encode("utf-8", "backslashreplace")
        descriptor = open_below(path.parent, path.name, os.O_WRONLY)
        try:
            os.pwrite(descriptor, content, 0)
            os.ftruncate(descriptor, len(content))
        finally:
            os.close(descriptor)


@contextmanager
def claimed(path: Path) -> Generator[bool, None, None]:
    """Hold an exclusive lock on a file within the block; yield False where another process holds it.

    `write_whole` replaces the file: read it within the block. Where the file system has no locks everybody gets it.
    """
    descriptor = open_below(path.parent, path.name, os.O_RDWR)
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
    if os.path.lexists(path):
        number = 1
        while os.path.lexists(older := path.with_name(f"{path.stem}.{number}{path.suffix}")):
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
