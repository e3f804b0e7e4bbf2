"""Words for a failed write: the system's reason, and how much room the disk has."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

# Errors of a file system without room: a full disk, a quota, a limit on files.
NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
# Text of errors that lost their number on the way: of another process, of safetensors.
_WORDS: Final = re.compile("|".join(re.escape(os.strerror(number)) for number in sorted(NO_ROOM)))
# A write that took a part of its bytes: torch's archives and numpy hide the number of the error.
_SHORT: Final = re.compile(r"inline_container\.cc|\d+ requested and \d+ written")
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30


def write_fault(path: str | os.PathLike[str], error: BaseException) -> str:
    """Return why a file or folder cannot be written, in one line; of a lack of room with the bytes that are free."""
    chain = list(_chain(error))
    reasons = [link.strerror for link in chain if isinstance(link, OSError) and link.strerror]
    text = next((match[0] for link in chain if (match := _WORDS.search(str(link)))), None)
    lines = str(error).strip().splitlines()
    if not lacks_room(error):
        return reasons[0] if reasons else (lines[0] if lines else type(error).__name__)
    room, full = _room(path)
    reason = text or (os.strerror(errno.ENOSPC) if full else "a write ended early")
    return f"{reason}: {room}" if room else reason


def lacks_room(error: BaseException) -> bool:
    """Return whether an error, or one that it follows from, says that a file system has no room."""
    return any(
        (isinstance(link, OSError) and link.errno in NO_ROOM) or _WORDS.search(str(link)) or _SHORT.search(str(link))
        for link in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it follows from or is a group of, each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop(0)
        if id(link) not in seen:
            seen.add(id(link))
            yield link
            group = cast("tuple[Any, ...]", getattr(link, "exceptions", ()))
            waiting += [other for other in (link.__cause__, link.__context__, *group) if other is not None]


def _room(path: str | os.PathLike[str]) -> tuple[str, bool]:
    """Return how much of its disk is free, in words, and whether it is full; empty words where the path is gone."""
    place = Path(path).absolute()
    place = next((folder for folder in (place, *place.parents) if folder.exists()), place)
    try:
        disk = os.statvfs(place)
    except OSError:
        return "", False
    if disk.f_files and not disk.f_favail:
        return f"the disk has room for no more files: all {disk.f_files} are there", True
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    size, unit = (_GIB, "GiB") if total >= 10 * _GIB else (_MIB, "MiB")
    if size == _GIB and free < _GIB:
        return f"the disk has {free / _MIB:.1f} MiB of {total / _GIB:.0f} GiB free", free < _MIB
    return f"the disk has {free / size:.1f} of {total / size:.{0 if total >= size else 1}f} {unit} free", free < _MIB
