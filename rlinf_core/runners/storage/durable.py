"""File system changes that are atomic even if the process or the machine dies at any moment; and files of records, one
per line, which one process extends while others read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Generic, TypeVar

from pydantic import ValidationError

from rlinf_core.foreign.files import (
    NO_ROOM,
    BadFileError,
    FileModel,
    create_aside,
    first_fault,
    open_below,
    open_log,
    open_regular,
)

T = TypeVar("T")
M = TypeVar("M", bound=FileModel)

# The errors of file systems without locks.
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
# The longest line: rlinf writes no longer ones. A longer line is read in pieces, which are no valid JSON.
_LONGEST_LINE: Final = 16 << 20
_MIB: Final = 1 << 20


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


class RecordFile(Generic[T]):
    """A file of records. Reading skips a torn last line.

    Args:
        path: the file, which need not exist.
        parse: makes a record from a line; raises ValueError with a description if the line is invalid.
        most: the largest size that is read, in bytes; None for no limit.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], T], most: int | None = None) -> None:
        self.path = path
        self._parse = parse
        self._most = most

    def __iter__(self) -> Iterator[T]:
        """Yield the records, without invalid lines.

        Raises:
            OSError: the file exists but cannot be read, or is larger than `most`.
        """
        return (record for _, _, record in self.placed())

    def placed(self) -> Iterator[tuple[int, int, T]]:
        """Yield each record with the offsets in bytes of the beginning and end of its line; raise as iteration does."""
        stop = 0
        for raw in self._lines():
            start, stop = stop, stop + len(raw)
            try:
                record = self._parse(raw)
            except ValueError:
                continue
            yield start, stop, record

    def with_faults(self, most: int | None = None) -> tuple[list[T], list[str]]:
        """Return the records, and descriptions of at most `most` invalid lines; raise as iteration does."""
        records: list[T] = []
        faults: list[str] = []
        for number, raw in enumerate(self._lines(), start=1):
            try:
                records.append(self._parse(raw))
            except ValueError as error:
                if most is None or len(faults) < most:
                    faults.append(f"line {number} of {self.path.name} was skipped: {error}")
        return records, faults

    def last(self, size: int) -> Iterator[T]:
        """Yield the records in the last `size` bytes, without invalid lines; raise as iteration does."""
        for raw in self._lines(size):
            with suppress(ValueError):
                yield self._parse(raw)

    def append(self, line: str) -> None:
        """Append a line as a whole or not at all. The file must have no other writer.

        Raises:
            OSError: the line cannot be written.
        """
        descriptor = open_log(self.path.parent, self.path.name)
        try:
            append_whole(descriptor, f"{line}\n".encode("utf-8", "backslashreplace"))
        finally:
            os.close(descriptor)

    def _lines(self, size: int | None = None) -> Iterator[bytes]:
        """Yield the lines except a torn last one; with `size`, only the whole lines in the last `size` bytes."""
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return
        with file:
            whole = os.fstat(file.fileno()).st_size
            if self._most is not None and whole > self._most:
                raise BadFileError(self.path, f"is larger than {self._most // _MIB} MiB")
            if size is not None and whole > size:
                file.seek(whole - size)
                file.readline(_LONGEST_LINE)
            while raw := file.readline(_LONGEST_LINE):
                if not raw.endswith(b"\n") and len(raw) < _LONGEST_LINE:
                    return
                yield raw


def parse_model(raw: bytes, model: type[M]) -> M:
    """Return the record in a line, as an instance of `model`.

    Raises:
        ValueError: the line is no such record; the message names the field and its value.
    """
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None


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
