"""Files of boxes and layers: unpack, pack, keep, read, count.

This runs in the processes that hold boxes, with the box's root, and so uses only the standard library. No link leads
out of the root, and where names are looked up twice, no process of the box is running.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import stat
import tarfile
from collections.abc import Iterable, Iterator
from typing import IO, Any, Final, NamedTuple, cast

from recipes.agent.boxes import trees

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
# The kernel overlay's mark of folders that a layer replaces.
_OPAQUE_MARK: Final = "user.overlay.opaque"
_CHUNK: Final = 1 << 20
# The memory limit of a process that unpacks, as an archive may declare headers of any length.
_MEMORY: Final = 512 << 20
# The number of files that are counted at a time.
_COUNTED: Final = 100
# The bytes of dropped paths in a message.
_SAID_BYTES: Final = 64 << 10
_SAID_CHARACTERS: Final = 1000


class TooLarge(Exception):  # noqa: N818 - says what is the matter
    """An archive that unpacks to more than it may."""


def why(error: BaseException) -> str:
    """Return the reason of an error, shortened for a message."""
    return (str(error) or type(error).__name__)[:_SAID_CHARACTERS]


def unpack(archive: int, target: str, most_bytes: int, most_files: int, *, layer: bool, lent: bool) -> int:
    """Unpack a tar archive below a folder, and return the bytes of its files.

    A malicious archive may raise any exception, which `why` spells. The process's memory is limited from then on.

    Args:
        archive: the descriptor of an open file.
        target: the folder; the root of this process is this folder, or a box.
        most_bytes, most_files: the limits of unpacked bytes and files.
        layer: whether names that begin with `.wh.` remove others, as in image layers; then owners are kept.
        lent: whether owners other than root can be kept.

    Raises:
        TooLarge: a limit is exceeded.
        OSError: a path leads out of the folder, a link does not fit, or the disk is full.
        tarfile.TarError: the file is no archive.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    os.makedirs(target, exist_ok=True)
    total = count = 0
    times = dict[str, int]()
    removed: list[str] = []
    with os.fdopen(archive, "rb", closefd=False) as file, tarfile.open(fileobj=file, mode="r|*") as packed:
        while (member := packed.next()) is not None:
            # The archive would keep all members otherwise.
            cast("Any", packed).members.clear()
            count, total = count + 1, total + (member.size if member.isreg() else 0)
            if member.size < 0 or total > most_bytes or count > most_files:
                raise TooLarge(f"it unpacks to more than {most_bytes >> 20} MiB or {most_files} files")
            path = _inside(target, member.name)
            if path == target:
                os.chmod(target, member.mode & 0o7777)
                continue
            if layer and os.path.basename(path).startswith(_WHITEOUT):
                removed.append(member.name)
                continue
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _extract(packed, member, target, path)
            _own(member, path, kept=layer and lent)
            if member.isdir():
                times[path] = int(member.mtime)
    # They hide what lower layers have, and nothing of this layer, wherever they stand in it.
    for marked in removed:
        _mark_removed(_inside(target, marked))
    for path, seconds in times.items():
        if not os.path.islink(path):
            os.utime(path, (seconds, seconds))
    return total


def _inside(target: str, name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise OSError(f"`{name}` leads out of the folder")
    path = os.path.join(target, *parts) if parts else target
    # Refuse links in the path: an archive could make a link and write through it.
    folder = target
    for part in parts[:-1]:
        folder = os.path.join(folder, part)
        if os.path.islink(folder):
            raise OSError(f"`{name}` is below a link")
    return path


def _mark_removed(path: str) -> None:
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    removed = folder if name == _OPAQUE else os.path.join(folder, name.removeprefix(_WHITEOUT))
    if not os.path.lexists(removed):
        os.mknod(removed, stat.S_IFCHR, os.makedev(0, 0))
    elif os.path.isdir(removed) and not os.path.islink(removed):
        os.setxattr(removed, _OPAQUE_MARK, b"y")


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, target: str, path: str) -> None:
    if os.path.lexists(path) and not (member.isdir() and os.path.isdir(path) and not os.path.islink(path)):
        trees.remove_tree(path)
    if member.isdir():
        os.makedirs(path, exist_ok=True)
    elif member.issym():
        os.symlink(member.linkname, path)
    elif member.islnk():
        source = _inside(target, member.linkname)
        os.link(source, path, follow_symlinks=False)
    elif member.isreg():
        source = cast("IO[bytes]", archive.extractfile(member))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            shutil.copyfileobj(source, file, _CHUNK)
    elif not member.ischr() and not member.isblk() and not member.isfifo():
        raise OSError(f"`{member.name}` is of an unknown kind")
    # Skip devices and pipes: a box has its own `/dev`.


def _own(member: tarfile.TarInfo, path: str, *, kept: bool) -> None:
    if not os.path.lexists(path):
        return
    if kept:
        os.chown(path, member.uid, member.gid, follow_symlinks=False)
    # A hard link may be one to a link, whose target is another file, or none.
    if not os.path.islink(path):
        os.chmod(path, member.mode & 0o7777)
        if member.isreg():
            os.utime(path, (member.mtime, member.mtime))


def pack(folder: str, stream: IO[bytes]) -> None:
    """Pack a layer in the format of images, with files named `.wh.NAME` for removed names. No link is followed."""
    with trees.opened(folder) as top, tarfile.open(fileobj=stream, mode="w|") as archive:
        walk = trees.Walk(top)
        for entry in walk:
            if not entry.left:
                _pack_entry(archive, walk, entry)


def _pack_entry(archive: tarfile.TarFile, walk: trees.Walk, entry: trees.TreeEntry) -> None:
    status, path = entry.status, walk.path(entry.name)
    info = tarfile.TarInfo(path)
    info.mode, info.uid, info.gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    info.mtime = status.st_mtime
    if stat.S_ISREG(status.st_mode):
        descriptor = os.open(entry.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=walk.folder)
        with os.fdopen(descriptor, "rb") as file:
            # `gettarinfo` stores further names of a file as links.
            archive.addfile(archive.gettarinfo(arcname=path, fileobj=file), file)
    elif stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(entry.name, dir_fd=walk.folder)
        archive.addfile(info)
    elif entry.is_folder:
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
        walk.enter()
        if _is_opaque(walk.folder):
            archive.addfile(tarfile.TarInfo(os.path.join(path, _OPAQUE)))
    elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        archive.addfile(tarfile.TarInfo(os.path.join(os.path.dirname(path), _WHITEOUT + entry.name)))


def _is_opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, _OPAQUE_MARK) == b"y"
    except OSError:
        return False


class _Rule(NamedTuple):
    """The rule of what is kept, as seen from one folder; `keep`: the folder is, or is below, a kept one.

    `wanted` and `never` are the remaining paths from here to folders to keep and to drop.
    """

    keep: bool
    wanted: list[list[str]]
    never: list[list[str]]

    @property
    def is_made(self) -> bool:
        """Whether the folder is also in the new layer."""
        return self.keep or bool(self.wanted)

    def at(self, name: str) -> _Rule:
        """Return the rule of an entry."""
        wanted, never = ([way[1:] for way in ways if way[:1] == [name]] for ways in (self.wanted, self.never))
        if [] in never:
            return _Rule(keep=False, wanted=[], never=[])
        return _Rule(self.keep or [] in wanted, wanted, never)


def _ways(paths: Iterable[str]) -> list[list[str]]:
    return [[part for part in path.split("/") if part] for path in paths]


class Kept(NamedTuple):
    """The result of `keep_only`.

    Attributes:
        dropped: dropped paths, as many as fit into a message, as text.
        number: the number of dropped paths.
        whole: whether the entries did not exceed the limit; entries beyond it are dropped uncounted.
    """

    dropped: list[str]
    number: int
    whole: bool


def keep_only(box: int, keep: Iterable[str], never: Iterable[str], most: int) -> Kept:
    """Make the layer `kept` from the parts of the layer `upper` below some folders, with hard links to its files.

    Args:
        box: the descriptor of the folder of both layers.
        keep: the absolute paths of folders and files to keep.
        never: the paths to drop even there.
        most: the maximum entries to visit.
    """
    wanted = _ways(keep)
    rules = [_Rule([] in wanted, wanted, _ways(never))]
    os.mkdir("kept", 0o755, dir_fd=box)
    with trees.opened("upper", box) as source, trees.opened("kept", box) as kept:
        return _kept_of(trees.Walk(source, most + 1), os.dup(kept), rules, most)


def _kept_of(walk: trees.Walk, target: int, rules: list[_Rule], most: int) -> Kept:
    dropped, number, room, looked_at = list[str](), 0, _SAID_BYTES, 0
    for entry in walk:
        if entry.left:
            target = _moved(target, "..") if rules.pop().is_made else target
            continue
        looked_at += 1
        if looked_at > most:
            break
        rule = rules[-1].at(entry.name)
        if entry.is_folder:
            if rule.is_made:
                os.mkdir(entry.name, dir_fd=target)
                target = _moved(target, entry.name)
            walk.enter()
            rules.append(rule)
            if rule.is_made:
                # Copy its marks, too: a folder may replace the image's and hide its content.
                _copy_facts(walk.folder, target)
        elif rule.keep:
            _link(entry.name, walk.folder, target)
        else:
            number += 1
            if room > 0:
                path = f"/{walk.path(entry.name)}"[:_SAID_CHARACTERS]
                dropped.append(path.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
                room -= len(json.dumps(dropped[-1]))
    os.close(target)
    return Kept(dropped, number, whole=looked_at <= most)


def _moved(folder: int, name: str) -> int:
    try:
        return os.open(name, trees.FOLDER, dir_fd=folder)
    finally:
        os.close(folder)


def _copy_facts(source: int, target: int) -> None:
    status = os.fstat(source)
    os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source):
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError:
            # Other attributes are the kernel's, or unknown here.
            if name == _OPAQUE_MARK:
                raise
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _link(name: str, source: int, target: int) -> None:
    try:
        os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.EMLINK:
            raise
        # The file has the maximum number of links, so move it.
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)


class PlainFile(NamedTuple):
    """The first bytes of a file, and its last change or that of a folder of its path, in nanoseconds since 1970."""

    data: bytes
    changed: int


def read_plain(path: str, most: int) -> PlainFile | None:
    """Return the first bytes of a regular file whose path has no link; None if there is none."""
    *folders, name = path.strip("/").split("/")
    place = os.open("/", trees.FOLDER)
    changed = 0
    try:
        for folder in folders:
            place = _moved(place, folder)
            # Check folders, too: moving a folder does not change its files.
            changed = max(changed, os.fstat(place).st_ctime_ns)
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            os.close(place)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return None
        return PlainFile(os.read(file, most), max(changed, status.st_ctime_ns))
    finally:
        os.close(file)


def disk_use(folder: int, most_bytes: int, most_files: int) -> Iterator[tuple[int, int]]:
    """Count the bytes and files below a folder, and yield the counts so far from time to time.

    Counting ends above one of the limits.

    Args:
        folder: the descriptor of the folder, which programs may be changing.
    """
    total = files = 0
    walk = trees.Walk(folder, most_files + 1)
    for entry in walk:
        if not entry.left:
            total, files = total + entry.status.st_blocks * 512, files + 1
            if entry.is_folder:
                with contextlib.suppress(OSError):
                    walk.enter()
        # A folder normally takes three steps; more mean that programs move folders during the walk.
        files = max(files, walk.steps // 4)
        if total > most_bytes or files > most_files:
            break
        if files % _COUNTED == 0:
            yield total, files
    yield total, files
