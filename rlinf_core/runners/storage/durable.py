"""File system changes that are atomic even if the process or the machine dies at any moment."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from rlinf_core.foreign.files import NO_ROOM, create_aside, open_below

# The errors of file systems without locks.
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Write a file atomically: readers find either the old or the new file.

    A link of this name is replaced, and its target not changed. All writers of whole files in a run folder use this.

    Args:
        path: the path of the file.
        content: the bytes, or the text, which is encoded as UTF-8.
        mode: the mode of the file, before the process's umask.

    Raises:
        OSError: the file cannot be written; no partial file is left.
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
    """Write a short file as `write_whole` does; on a full disk, overwrite the old file in place.

    A crash at that moment may leave a partial file, which is better than a missing end status.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        if error.errno not in NO_ROOM or not os.path.exists(path):
            raise
        content = text.encode("utf-8", "backslashreplace")
        descriptor = open_below(path.parent, path.name, os.O_WRONLY)
        try:
            os.pwrite(descriptor, content, 0)
            os.ftruncate(descriptor, len(content))
        finally:
            os.close(descriptor)


def write_all(descriptor: int, content: bytes) -> None:
    """Write all bytes at the current offset of a file; `os.write` may write only a part if the disk fills up.

    Raises:
        OSError: the bytes cannot be written; a part of them may be.
    """
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def append_whole(descriptor: int, content: bytes) -> None:
    """Append all bytes or none to a file that is open with O_APPEND and has no other writer.

    Raises:
        OSError: the bytes cannot be written.
    """
    size = os.fstat(descriptor).st_size
    try:
        write_all(descriptor, content)
    except BaseException:
        # The next record would be read as the rest of a partial one.
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


@contextmanager
def claimed(path: Path, flags: int = os.O_RDWR) -> Generator[bool, None, None]:
    """Hold an exclusive lock on a file within the block; yield False if another process holds it.

    `write_whole` replaces the file, so read it within the block. Without locks in the file system, it yields True.
    With the flags `os.O_RDONLY`, a file that may only be read can be locked on most file systems.
    """
    descriptor = open_below(path.parent, path.name, flags)
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
        # Closing releases the lock.
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync all files below `folder`, and their names, to disk."""
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync(Path(parent) / name)
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    """Sync the names in `folder` to disk, if its file system supports that."""
    try:
        _sync(folder)
    except OSError:
        # Some network file systems refuse this for folders, but keep the order of name changes themselves.
        return


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder within its folder, durably."""
    os.rename(old, new)
    sync_folder(new.parent)


def keep_old(path: Path) -> None:
    """Rename an existing file with the first free number: `config.1.yaml`."""
    if os.path.lexists(path):
        number = 1
        while os.path.lexists(older := path.with_name(f"{path.stem}.{number}{path.suffix}")):
            number += 1
        rename(path, older)


def remove_tree(folder: Path) -> None:
    """Remove a folder with its contents, if it exists; of a link to a folder, only the link."""
    if folder.is_symlink():
        with suppress(OSError):
            folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
