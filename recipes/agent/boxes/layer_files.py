"""Files of boxes and layers: unpack, keep, read, remove.

Runs in the processes that hold boxes, with the box's own root: standard library only. No link leads out of it, and
what runs in a box has ended, or not begun, where names are looked up twice.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from typing import IO, Final, cast

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
# The kernel's overlay has these for names that a layer removes, and for folders that it replaces.
_OPAQUE_MARK: Final = "user.overlay.opaque"
_CHUNK: Final = 1 << 20


class TooLarge(Exception):  # noqa: N818 - says what is the matter
    """An archive that unpacks to more than it may."""


def unpack(stream: IO[bytes], target: str, most_bytes: int, most_files: int, *, layer: bool, lent: bool) -> int:
    """Unpack a tar archive below a folder, and return the bytes of its files.

    Args:
        target: the folder; the root of this process is this folder, or a box.
        most_bytes, most_files: limits of what is unpacked.
        layer: whether names that begin with `.wh.` remove others, as in layers of images; owners are kept then.
        lent: whether owners other than root can be kept.

    Raises:
        TooLarge: a limit is exceeded.
        OSError: a path leads out of the folder, a link does not fit, or the disk is full.
        tarfile.TarError: it is no archive.
    """
    os.makedirs(target, exist_ok=True)
    total, times = 0, dict[str, int]()
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        for count, member in enumerate(archive, 1):
            total += member.size if member.isreg() else 0
            if total > most_bytes or count > most_files:
                raise TooLarge(f"it unpacks to more than {most_bytes >> 20} MiB or {most_files} files")
            path = _inside(target, member.name)
            if path == target:
                os.chmod(target, member.mode & 0o7777)
                continue
            folder, name = os.path.split(path)
            os.makedirs(folder, exist_ok=True)
            if layer and name.startswith(_WHITEOUT):
                _mark_removed(folder, name)
                continue
            _extract(archive, member, target, path)
            _own(member, path, kept=layer and lent)
            if member.isdir():
                times[path] = int(member.mtime)
    for path, seconds in times.items():
        if not os.path.islink(path):
            os.utime(path, (seconds, seconds))
    return total


def _inside(target: str, name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise OSError(f"`{name}` leads out of the folder")
    path = os.path.join(target, *parts) if parts else target
    # No part of the way is a link: what an archive links to elsewhere it would write there.
    folder = target
    for part in parts[:-1]:
        folder = os.path.join(folder, part)
        if os.path.islink(folder):
            raise OSError(f"`{name}` is below a link")
    return path


def _mark_removed(folder: str, name: str) -> None:
    if name == _OPAQUE:
        os.setxattr(folder, _OPAQUE_MARK, b"y")
        return
    removed = os.path.join(folder, name.removeprefix(_WHITEOUT))
    if not os.path.lexists(removed):
        os.mknod(removed, stat.S_IFCHR, os.makedev(0, 0))


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, target: str, path: str) -> None:
    if os.path.lexists(path) and not (member.isdir() and os.path.isdir(path) and not os.path.islink(path)):
        _remove(path)
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
    # Devices and pipes are left out: a box has its own `/dev`.


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _own(member: tarfile.TarInfo, path: str, *, kept: bool) -> None:
    if not os.path.lexists(path):
        return
    if kept:
        os.chown(path, member.uid, member.gid, follow_symlinks=False)
    if not member.issym():
        os.chmod(path, member.mode & 0o7777)
        if member.isreg():
            os.utime(path, (member.mtime, member.mtime))


def pack(folder: str, stream: IO[bytes]) -> None:
    """Pack a layer as images have them: what it removes is a file named `.wh.NAME`. No link is followed."""
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        pending = [""]
        while pending:
            inner = pending.pop()
            if inner and _is_opaque(os.path.join(folder, inner)):
                archive.addfile(tarfile.TarInfo(os.path.join(inner, _OPAQUE)))
            for name in sorted(os.listdir(os.path.join(folder, inner))):
                path, place = os.path.join(folder, inner, name), os.path.join(inner, name)
                info = archive.gettarinfo(path, place)
                if info.ischr() and (info.devmajor, info.devminor) == (0, 0):
                    archive.addfile(tarfile.TarInfo(os.path.join(inner, _WHITEOUT + name)))
                elif info.isreg():
                    with open(path, "rb") as file:
                        archive.addfile(info, file)
                elif not info.ischr() and not info.isblk() and not info.isfifo():
                    archive.addfile(info)
                    pending += [place] if info.isdir() else []


def _is_opaque(folder: str) -> bool:
    try:
        return os.getxattr(folder, _OPAQUE_MARK, follow_symlinks=False) == b"y"
    except OSError:
        return False


def keep_only(upper: str, kept: str, keep: list[str], never: list[str]) -> list[str]:
    """Make a layer of the parts of another that lie below some folders, and return what was dropped.

    Args:
        upper: the layer.
        kept: the new one, on the same file system: files are the same ones.
        keep: absolute paths of folders and files.
        never: paths that are dropped even there.
    """
    wanted, unwanted = ([path.strip("/") for path in paths] for paths in (keep, never))
    dropped: list[str] = []
    os.mkdir(kept, 0o755)

    def walk(path: str) -> None:
        with os.scandir(f"{upper}/{path}") as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
        for entry in listed:
            inner = f"{path}/{entry.name}".lstrip("/")
            below = any(not folder or f"{inner}/".startswith(f"{folder}/") for folder in wanted)
            above = any(folder.startswith(f"{inner}/") for folder in wanted)
            if any(f"{inner}/".startswith(f"{folder}/") for folder in unwanted):
                below = above = False
            if entry.is_dir(follow_symlinks=False) and (below or above):
                status = entry.stat(follow_symlinks=False)
                os.mkdir(f"{kept}/{inner}")
                os.chown(f"{kept}/{inner}", status.st_uid, status.st_gid)
                # A folder on the way that replaces the image's hides what the image has there.
                shutil.copystat(f"{upper}/{inner}", f"{kept}/{inner}")
                walk(inner)
            elif below:
                os.link(f"{upper}/{inner}", f"{kept}/{inner}", follow_symlinks=False)
            elif entry.is_dir(follow_symlinks=False):
                below_it = (os.path.join(folder, name) for folder, _, files in os.walk(entry.path) for name in files)
                dropped.extend(sorted(path.removeprefix(upper) for path in below_it))
            else:
                dropped.append(f"/{inner}")

    walk("")
    return dropped


def read_plain(path: str, most: int) -> bytes | None:
    """Return the first bytes of a regular file whose path has no link; None where there is none."""
    folder = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    parts = path.strip("/").split("/")
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    finally:
        os.close(folder)
    try:
        return os.read(file, most) if stat.S_ISREG(os.fstat(file).st_mode) else None
    finally:
        os.close(file)


def disk_use(folder: str, most: int) -> int:
    """Return the bytes that files below a folder take; counting ends above `most`."""
    total, pending = 0, [folder]
    while pending and total <= most:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError:
            continue
    return total


def remove_tree(folder: str) -> None:
    """Remove a folder and what is below it; what cannot be removed is left to the sweep. No link is followed."""
    try:
        # The overlay leaves a folder without any permission.
        os.chmod(folder, 0o700)
        with os.scandir(folder) as entries:
            listed = list(entries)
        for entry in listed:
            if entry.is_dir(follow_symlinks=False):
                remove_tree(entry.path)
            else:
                os.unlink(entry.path)
        os.rmdir(folder)
    except OSError:
        return
