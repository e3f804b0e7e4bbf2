"""Reading and writing of untrusted files, within limits of size and without following links when writing.

A path may name a pipe that never ends, a device, a link into a home folder, or gigabytes. Readers never block and
accept only regular files; writers replace or refuse a link instead of writing to its target.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any, Final, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlinf_core.foreign.budget import GIB, MIB
from rlinf_core.foreign.strict_json import BadJsonError, load_json_object

# The default limit, for descriptions; logs, metrics and traces are read piece by piece.
MOST_BYTES: Final = 64 * MIB
_LINKED: Final = "is a link, which is not followed"
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class BadFileError(OSError):
    """A file with invalid content; `strerror` is a sentence without its subject."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        super().__init__(errno.EINVAL, why, os.fspath(path))


def read_fault(error: OSError) -> str:
    """Return why a file cannot be used, as a sentence without its subject."""
    reason = error.strerror or type(error).__name__
    return reason if isinstance(error, BadFileError) else f"cannot be read: {reason}"


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file for reading, without blocking whatever the path names.

    Raises:
        OSError: the file cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    # Opening a device may have effects, so the path is checked before, and the open file again.
    _check_regular(path, os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: str | os.PathLike[str]) -> None:
    """Check that a path names a regular file, or a link to one, for readers that open it by themselves.

    Raises:
        OSError: the path does not exist, or is a folder, a pipe, a socket or a device.
    """
    _check_regular(path, os.stat(path))


def read_bounded(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises:
        OSError: see `open_regular`; or the file is larger.
    """
    with open_regular(path) as file:
        # A file in /proc or /sys may hold more than its size says.
        content = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else b""
        is_larger = len(content) > most or os.fstat(file.fileno()).st_size > most
    if is_larger:
        size = f"{most // MIB} MiB" if most >= MIB else f"{most} bytes"
        raise BadFileError(path, f"is larger than {size}")
    return content


def read_text(path: str | os.PathLike[str], most: int = MOST_BYTES) -> str:
    """Return the text of a regular file; bytes that are not UTF-8 are replaced.

    Raises:
        OSError: see `read_bounded`.
    """
    return read_bounded(path, most).decode("utf-8", "replace")


def read_json_object(path: str | os.PathLike[str], most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the fields of the JSON object in a file.

    Raises:
        OSError: see `read_bounded`; or the file does not hold a valid JSON object (see `strict_json`).
    """
    try:
        return load_json_object(read_bounded(path, most))
    except BadJsonError as error:
        raise BadFileError(path, str(error)) from None


def make_folder(folder: Path) -> None:
    """Make a folder in a run folder, unless it exists.

    Raises:
        OSError: the folder cannot be made, or is a link.
    """
    folder.mkdir(exist_ok=True)
    if folder.is_symlink():
        raise BadFileError(folder, _LINKED)


def create_aside(path: Path, mode: int = 0o666) -> tuple[int, Path]:
    """Create a temporary file beside `path`, to be renamed to `path`; return its descriptor and path.

    `mode` is subject to the process's umask. No existing file or link is opened.

    Raises:
        OSError: the file cannot be made.
    """
    while True:
        part = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.part")
        try:
            return os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), part
        except FileExistsError:
            continue


def open_below(root: str | os.PathLike[str], name: str, flags: int, mode: int = 0o666) -> int:
    """Open the regular file `name` below the folder `root`; return its descriptor.

    Missing folders are made. No part of `name` may be a link, so that a received folder cannot redirect a write.

    Args:
        root: an existing folder, which may be reached through links.
        name: a relative path, its parts separated by `/`.
        flags: the flags of `os.open`; with O_CREAT a missing file is made.
        mode: the mode of a new file, before the process's umask.

    Raises:
        OSError: the file cannot be opened, a part of the name is a link, or the file is not regular.
    """
    *folders, last = name.split("/")
    at = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
    try:
        for number, part in enumerate(folders):
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=at)
            below = _opened(root, folders[: number + 1], part, _FOLDER, 0, at)
            os.close(at)
            at = below
        with suppress(FileNotFoundError):
            _check_regular(os.path.join(root, name), os.stat(last, dir_fd=at, follow_symlinks=False))
        wanted = flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = _opened(root, [*folders, last], last, wanted, mode, at)
    finally:
        os.close(at)
    try:
        _check_regular(os.path.join(root, name), os.fstat(descriptor))
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_log(root: str | os.PathLike[str], name: str) -> int:
    """Open the file `name` below `root` for appending, creating it if missing; see `open_below`."""
    return open_below(root, name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _opened(root: str | os.PathLike[str], names: list[str], part: str, flags: int, mode: int, folder: int) -> int:
    path = os.path.join(root, *names)
    try:
        return os.open(part, flags, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(path):
            raise BadFileError(path, _LINKED) from None
        raise OSError(error.errno, error.strerror, path) from None


def _check_regular(path: str | os.PathLike[str], info: os.stat_result) -> None:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    if stat.S_ISLNK(info.st_mode):
        raise BadFileError(path, _LINKED)
    if not stat.S_ISREG(info.st_mode):
        raise BadFileError(path, f"is {kinds.get(stat.S_IFMT(info.st_mode), 'a device')}, not a regular file")


# Errors of a file system without room: a full disk, a quota, a limit on the size of files.
NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
# The texts of these errors, for exceptions without the error number, as from another process or from safetensors.
_WORDS: Final = re.compile("|".join(re.escape(os.strerror(number)) for number in sorted(NO_ROOM)))
# Messages of torch's archives and of NumPy for a partial write, which hide the error number.
_SHORT: Final = re.compile(r"inline_container\.cc|\d+ requested and \d+ written")


def write_fault(path: str | os.PathLike[str], error: BaseException) -> str:
    """Return why a file or folder cannot be written, in one line, with the free space if room is lacking."""
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
    """Return whether an error, or one in its chain or group, says that a file system has no room."""
    return any(
        (isinstance(link, OSError) and link.errno in NO_ROOM) or _WORDS.search(str(link)) or _SHORT.search(str(link))
        for link in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes, contexts and members of groups, each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop(0)
        if id(link) not in seen:
            seen.add(id(link))
            yield link
            group = cast("tuple[Any, ...]", getattr(link, "exceptions", ()))
            waiting += [other for other in (link.__cause__, link.__context__, *group) if other is not None]


def _room(path: str | os.PathLike[str]) -> tuple[str, bool]:
    """Return the free space of the path's disk in words (empty if unknown), and whether the disk is full."""
    place = Path(path).absolute()
    place = next((folder for folder in (place, *place.parents) if folder.exists()), place)
    try:
        disk = os.statvfs(place)
    except OSError:
        return "", False
    if disk.f_files and not disk.f_favail:
        return f"the disk has room for no more files: all {disk.f_files} are there", True
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    size, unit = (GIB, "GiB") if total >= 10 * GIB else (MIB, "MiB")
    if size == GIB and free < GIB:
        return f"the disk has {free / MIB:.1f} MiB of {total / GIB:.0f} GiB free", free < MIB
    return f"the disk has {free / size:.1f} of {total / size:.{0 if total >= size else 1}f} {unit} free", free < MIB


_LONGEST_VALUE: Final = 60
# Words of pydantic's messages, and our words for them.
_PLAIN_WORDS: Final = (
    ("a valid dictionary", "a mapping"),
    ("a valid string", "a text"),
    ("a valid integer", "a whole number"),
    ("a valid number", "a number"),
    ("a valid list", "a list"),
    ("a valid boolean", "true or false"),
)

Moment = Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)]
"""Seconds since 1970, before the year 5000."""
Step = Annotated[int, Field(ge=0, lt=2**53)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
Rank = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]


class FileModel(BaseModel):
    """A file of a run folder, or a part of one. No value is converted; fields of later versions are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


M = TypeVar("M", bound=FileModel)


def read_model(path: Path, model: type[M], most: int = MOST_BYTES) -> M:
    """Return the content of a JSON file in a run folder.

    Raises:
        OSError: the file is missing, cannot be read, or has an invalid value; `strerror` names the field and the
            value, and is a sentence without its subject.
    """
    try:
        return model.model_validate(read_json_object(path, most))
    except ValidationError as error:
        raise BadFileError(path, f"has an invalid value: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """Return in words the first field that a model rejected, with its value, if any."""
    fault = error.errors(include_url=False)[0]
    place = [*map(str, fault["loc"])]
    message = fault["msg"].removeprefix("Value error, ").replace(" or instance of Attempt", "")
    message = message.replace("Input should", "it should")
    for word, plain in _PLAIN_WORDS:
        message = message.replace(word, plain)
    if not place:
        return f"{message[:1].lower()}{message[1:]}"
    if place[-1] == "[key]":
        name, field = f"the key {_shown(fault['input'])}", ".".join(place[:-2])
        return f"`{field}` has {name}, but {message[:1].lower()}{message[1:]}"
    name = ".".join(place)
    if fault["type"] == "missing":
        return f"`{name}` is missing"
    return f"`{name}` is {_shown(fault['input'])}, but {message[:1].lower()}{message[1:]}"


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return f"`{text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + '...'}`"
