"""Walks through folders of a box's programs, which may have any depth and change during the walk.

A walk uses single names and descriptors, never paths that grow with the depth, and keeps two descriptors open. It runs
in the processes that hold boxes, and so uses only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The maximum names of one folder in memory at once.
_AT_ONCE: Final = 1 << 14


class TreeEntry(NamedTuple):
    """An entry of a folder.

    Attributes:
        name: the name in `Walk.folder`.
        status: the status of the entry; no link is followed.
        left: whether the entry is a folder that the walk has just left.
    """

    name: str
    status: os.stat_result
    left: bool = False

    @property
    def is_folder(self) -> bool:
        """Whether the entry is a folder, not a link to one."""
        return stat.S_ISDIR(self.status.st_mode)


class _Level(NamedTuple):
    entry: TreeEntry
    identity: tuple[int, int]
    pending: Iterator[str]


class Walk:
    """A walk that yields the entries of each folder in order; `enter` descends into the last entry.

    Args:
        top: the descriptor of the folder.
        most: the maximum entries to visit per folder.

    Attributes:
        folder: the descriptor of the last entry's folder, which belongs to the walk.
        steps: the number of names looked up, a measure of the work.
    """

    def __init__(self, top: int, most: int = _AT_ONCE) -> None:
        self._top, self._most = top, most
        self.folder = os.dup(top)
        self.steps = 0
        self._way: list[_Level] = []
        self._pending = self._listed()
        self._entry: TreeEntry | None = None

    def __iter__(self) -> Iterator[TreeEntry]:
        """Yield each entry, and each entered folder again when it is left."""
        try:
            while True:
                name = next(self._pending, None)
                if name is not None:
                    entry = self._seen(name)
                elif self._way:
                    entry = self._leave()._replace(left=True)
                else:
                    return
                if entry is not None:
                    self._entry = entry
                    yield entry
        finally:
            os.close(self.folder)

    def enter(self) -> None:
        """Continue with the entries of the folder that was yielded last.

        Raises:
            OSError: the folder cannot be opened, or is no longer a folder.
        """
        assert self._entry is not None
        level = _Level(self._entry, _identity(self.folder), self._pending)
        self._go(level.entry.name)
        self._way.append(level)
        self._pending = self._listed()

    def path(self, name: str) -> str:
        """Return the path of an entry of `folder`, relative to the top."""
        return "/".join([*(level.entry.name for level in self._way), name])

    def _seen(self, name: str) -> TreeEntry | None:
        self.steps += 1
        try:
            return TreeEntry(name, os.stat(name, dir_fd=self.folder, follow_symlinks=False))
        except FileNotFoundError:
            return None

    def _go(self, name: str) -> None:
        self.steps += 1
        inner = os.open(name, FOLDER, dir_fd=self.folder)
        os.close(self.folder)
        self.folder = inner

    def _listed(self) -> Iterator[str]:
        with os.scandir(self.folder) as entries:
            return iter(sorted(entry.name for entry in itertools.islice(entries, self._most)))

    def _leave(self) -> TreeEntry:
        level = self._way.pop()
        self._pending = level.pending
        self._go("..")
        if _identity(self.folder) != level.identity:
            self._find_way()
        return level.entry

    def _find_way(self) -> None:
        """Follow the path from the top as far as it still exists, after a program moved one of its folders."""
        os.close(self.folder)
        self.folder = os.dup(self._top)
        for depth, level in enumerate(self._way):
            self._way[depth] = level._replace(identity=_identity(self.folder))
            try:
                self._go(level.entry.name)
            except OSError:
                self._pending = level.pending
                del self._way[depth:]
                return


@contextmanager
def opened(name: str, folder: int | None = None) -> Generator[int]:
    """Open a folder, not a link, in another folder or in the current one."""
    descriptor = os.open(name, FOLDER, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def remove_tree(name: str, folder: int | None = None) -> None:
    """Remove a file or folder with its content, as far as possible; no link is followed.

    Args:
        name: the name, or a path.
        folder: the descriptor of the folder of the name; None: the current folder.
    """
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
            return
        # The overlay creates a folder without any permission.
        os.chmod(name, 0o700, dir_fd=folder)
        with opened(name, folder) as top:
            while _remove_some(top):
                continue
        os.rmdir(name, dir_fd=folder)


def _remove_some(top: int) -> bool:
    """Remove the content of a folder, or a part of it if large; return whether anything was removed."""
    walk, removed, before = Walk(top), 0, list[int]()
    for entry in walk:
        try:
            if not entry.is_folder:
                os.unlink(entry.name, dir_fd=walk.folder)
                removed += 1
            elif entry.left:
                began = before.pop()
                try:
                    os.rmdir(entry.name, dir_fd=walk.folder)
                    removed += 1
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY or removed == began:
                        raise
                    walk.enter()
                    before.append(removed)
            else:
                if entry.status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
                    os.chmod(entry.name, stat.S_IRWXU, dir_fd=walk.folder)
                walk.enter()
                before.append(removed)
        except OSError:
            continue
    return removed > 0
