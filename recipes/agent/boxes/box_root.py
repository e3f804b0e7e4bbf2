"""The root of a box: what is mounted there, and which users its files name.

Runs in the process that holds the box: standard library only.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from recipes.agent.boxes import kernel

# Files and folders of `/dev` and of `/dev/shm`: empty ones take the kernel's memory, too.
_DEVICE_FILES, _SHARED_FILES = 1 << 10, 1 << 14
# A file, or a link that leads nowhere, is in a folder's place.
_BLOCKED: Final = (errno.EEXIST, errno.ENOTDIR, errno.ELOOP, errno.ENOENT)
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")


class BlockedFolder(Exception):  # noqa: N818 - says what the layers have
    """A folder that the box needs is something else in its layers."""


def mount_root(links: str, layers: int, shared_memory: int) -> None:
    """Mount the box's root in the folder `root` of the current one, and go there.

    Args:
        links: a folder with links to those of the image, which are named by numbers, from 0 on for the uppermost.
        layers: how many there are.
        shared_memory: bytes of `/dev/shm`.

    Raises:
        OSError: the kernel refuses a mount, or the image has a link where a mount belongs.
    """
    kernel.mount("none", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
    lower = ":".join(f"{links}/{number}" for number in range(layers))
    kernel.mount("overlay", "root", "overlay", 0, f"lowerdir={lower},upperdir=upper,workdir=work,userxattr")
    for folder in ("dev", "proc"):
        if os.path.islink(f"root/{folder}"):
            # Until the root is changed, it would lead out.
            raise OSError(f"/{folder} of the image is a link")
        os.makedirs(f"root/{folder}", exist_ok=True)
    devices = f"mode=755,size=64k,nr_inodes={_DEVICE_FILES}"
    kernel.mount("tmpfs", "root/dev", "tmpfs", kernel.NO_SUID | kernel.NO_EXEC, devices)
    for device in _DEVICES:
        os.close(os.open(f"root/dev/{device}", os.O_CREAT | os.O_WRONLY))
        kernel.mount(f"/dev/{device}", f"root/dev/{device}", flags=kernel.BIND)
    for folder in ("pts", "shm"):
        os.mkdir(f"root/dev/{folder}")
    options = "newinstance,ptmxmode=0666,mode=620"
    kernel.mount("devpts", "root/dev/pts", "devpts", kernel.NO_SUID | kernel.NO_EXEC, options)
    shared = f"mode=1777,size={shared_memory},nr_inodes={_SHARED_FILES}"
    kernel.mount("tmpfs", "root/dev/shm", "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, shared)
    os.symlink("pts/ptmx", "root/dev/ptmx")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"root/dev/{name}")
    os.chdir("root")


def make_folder(folder: str) -> None:
    """Make a folder of a box where it is missing.

    Raises:
        BlockedFolder: it, or one above it, is something else.
    """
    try:
        if not os.path.isdir(folder):
            os.makedirs(folder)
    except OSError as error:
        if error.errno not in _BLOCKED:
            raise
        raise BlockedFolder(f"`{folder}` is no folder: {error.strerror}") from None


def find_user(user: str) -> tuple[int, int, list[int]]:
    """Return the ids of a user as the box's own files have them; "" is root."""
    name, _, group = user.partition(":")
    if name in ("", "root", "0"):
        return 0, 0, []
    try:
        with open("/etc/passwd", encoding="utf-8") as file:
            rows = [line.rstrip("\n").split(":") for line in file]
        with open("/etc/group", encoding="utf-8") as file:
            groups = [line.rstrip("\n").split(":") for line in file]
    except OSError:
        rows, groups = [], []
    for row in rows:
        if len(row) > 3 and name in (row[0], row[2]):
            own = [int(listed[2]) for listed in groups if len(listed) > 3 and row[0] in listed[3].split(",")]
            return int(row[2]), int(row[3]), [int(row[3]), *own]
    if name.isdigit():
        gid = int(group) if group.isdigit() else int(name)
        return int(name), gid, [gid]
    raise OSError(f"the box has no user {user!r}")
