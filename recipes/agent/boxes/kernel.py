"""Linux system calls that create a box: namespaces, ids, mounts, capabilities, the filter of system calls.

Also the root of a box, and the users in its files. This runs in the processes that hold boxes, and so uses only the
standard library.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import struct
import subprocess
from typing import Final, TypedDict

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000
# Namespaces of mounts, control groups, host name, System V IPC, users, processes and network.
NEW_ALL: Final = NEW_MOUNTS | 0x2000000 | 0x4000000 | 0x8000000 | NEW_USER | 0x20000000 | 0x40000000
NO_SUID, NO_DEVICES, NO_EXEC, BIND, RECURSIVE, PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_DETACH: Final = 2
_PDEATHSIG, _DUMPABLE, _NAME, _SECCOMP, _CAPBSET_DROP = 1, 4, 15, 22, 24
_FILTER: Final = 2
_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
_CLOSE_RANGE: Final = 436
# Docker's capabilities of a container's root, except devices: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID,
# SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, AUDIT_WRITE, SETFCAP.
_KEPT_CAPS: Final = frozenset((0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 29, 31))
_LAST_CAP: Final = 63
_LOOPBACK_UP: Final = struct.pack("16sh14x", b"lo", 0x1 | 0x40)
_SET_FLAGS: Final = 0x8914


class Ids(TypedDict):
    """The ids of a box: `how` they are mapped, and the first outside id with the count, for users and groups.

    `how` is `written` by root, `lent` by the system (`/etc/subuid`), or `single`: root of the box alone is the user.
    """

    how: str
    users: tuple[int, int]
    groups: tuple[int, int]


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _prctl(option: int, value: int) -> None:
    _check(_LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def die_with_parent() -> None:
    """Have this process killed when the thread that forked it ends."""
    _prctl(_PDEATHSIG, signal.SIGKILL)


def set_dumpable(dumpable: bool) -> None:
    """Set whether other processes of the same user may inspect this process."""
    _prctl(_DUMPABLE, int(dumpable))


def set_name(name: bytes) -> None:
    """Set the name that `ps` and `top` show, at most 15 bytes."""
    _check(_LIBC.prctl(_NAME, ctypes.c_char_p(name), 0, 0, 0), "prctl name")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Mount a file system. The kernel accepts at most a page of options."""
    words = [text.encode() if text else None for text in (source, target, kind)]
    _check(_LIBC.mount(*words, ctypes.c_ulong(flags), data.encode() or None), f"mount {kind or 'bind'} on /{target}")


def change_root() -> None:
    """Make the current folder, a mount, the root, and detach the old one."""
    _check(_LIBC.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_LIBC.umount2(b".", _DETACH), "umount of the old root")
    os.chdir("/")


def loopback_up() -> None:
    """Bring up the loopback interface of this network namespace."""
    with socket.socket() as probe:
        fcntl.ioctl(probe, _SET_FLAGS, _LOOPBACK_UP)


def drop_capabilities() -> None:
    """Drop capabilities from the bounding set, which takes effect with the next executed program."""
    for cap in range(_LAST_CAP + 1):
        if cap not in _KEPT_CAPS:
            _LIBC.prctl(_CAPBSET_DROP, ctypes.c_ulong(cap), 0, 0, 0)


def close_from(first: int) -> None:
    """Close all descriptors from a number on, as they lead out of a box through `/proc/self/fd`."""
    if _LIBC.syscall(_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(0xFFFFFFFF), 0):
        os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def close_others(*descriptors: int) -> list[int]:
    """Close all descriptors except the given ones, renumber these from 0, and return their numbers."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, len(descriptors)) for descriptor in descriptors]
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number)
    close_from(len(high))
    return list(range(len(high)))


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def filter_calls(steps: bytes) -> None:
    """Refuse system calls to this process and its descendants.

    Root of a user namespace can do so without losing set-user-id programs, such as `su`.
    """
    program = _Filter(len(steps) // 8, steps)
    _check(_LIBC.prctl(_SECCOMP, ctypes.c_ulong(_FILTER), ctypes.byref(program), 0, 0), "the filter of system calls")


def enter_namespaces(flags: int, ids: Ids) -> None:
    """Move this process into new namespaces, and become their root.

    Raises:
        OSError: the kernel refuses a namespace, or the ids cannot be mapped.
    """
    set_dumpable(True)
    go_reader, go_writer = os.pipe()
    said_reader, said_writer = os.pipe()
    me = os.getpid()
    helper = os.fork()
    if helper == 0:
        said = "ended"
        try:
            os.close(go_writer)
            if os.read(go_reader, 1):
                _map_ids(me, ids)
                said = ""
        except (OSError, subprocess.SubprocessError) as error:
            said = str(error)
        os.write(said_writer, said.encode()[:500] or b"\n")
        os._exit(0)
    os.close(said_writer)
    os.close(go_reader)
    try:
        _check(_LIBC.unshare(flags), "unshare")
        os.write(go_writer, b"1")
        said = os.read(said_reader, 500)
    finally:
        os.close(go_writer)
        os.close(said_reader)
        os.waitpid(helper, 0)
    if said != b"\n":
        raise OSError(f"ids cannot be mapped: {said.decode(errors='replace')}")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    if ids["how"] != "single":
        os.setgroups([])
    set_dumpable(False)


def _map_ids(pid: int, ids: Ids) -> None:
    """Map the ids of a process's new namespace, from the parent namespace."""
    if ids["how"] == "lent":
        # 0 maps to the user, other ids to the lent ones.
        for program, own, (first, count) in (
            ("newuidmap", os.getuid(), ids["users"]),
            ("newgidmap", os.getgid(), ids["groups"]),
        ):
            words = [program, str(pid), "0", str(own), "1", "1", str(first), str(count)]
            subprocess.run(words, check=True, capture_output=True)
        return
    if ids["how"] == "single":
        _write(pid, "setgroups", "deny")
    for file, (first, count) in (("uid_map", ids["users"]), ("gid_map", ids["groups"])):
        _write(pid, file, f"0 {first} {count}")


def _write(pid: int, file: str, text: str) -> None:
    with open(f"/proc/{pid}/{file}", "w", encoding="ascii") as target:
        target.write(text)


# The maximum files and folders in `/dev` and `/dev/shm`, as even empty ones take kernel memory.
_DEVICE_FILES, _SHARED_FILES = 1 << 10, 1 << 14
# Errors if a file or a dangling link is in a folder's place.
_BLOCKED: Final = (errno.EEXIST, errno.ENOTDIR, errno.ELOOP, errno.ENOENT)
# The lowest layer of each box. As in Docker, a box knows its own names, unless the image has a file of names.
OWN_LAYER, HOST_NAME = "own", "box"
_HOSTS: Final = f"127.0.0.1\tlocalhost {HOST_NAME}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")


class BlockedFolder(Exception):  # noqa: N818 - says what the layers have
    """A folder that the box needs, but that is something else in its layers."""


def mount_root(links: str, layers: int, shared_memory: int) -> None:
    """Mount the box's root in the folder `root` of the current folder, and change to it.

    Args:
        links: the folder of links to the image's layers, named by numbers from 0, the uppermost.
        layers: the number of layers.
        shared_memory: the bytes of `/dev/shm`.

    Raises:
        OSError: the kernel refuses a mount, or the image has a link in place of a mount point.
    """
    mount("none", "/", flags=RECURSIVE | PRIVATE)
    os.mkdir(f"{OWN_LAYER}/etc")
    with open(f"{OWN_LAYER}/etc/hosts", "w", encoding="ascii") as file:
        file.write(_HOSTS)
    lower = ":".join([*(f"{links}/{number}" for number in range(layers)), OWN_LAYER])
    mount("overlay", "root", "overlay", 0, f"lowerdir={lower},upperdir=upper,workdir=work,userxattr")
    for folder in ("dev", "proc"):
        if os.path.islink(f"root/{folder}"):
            # The link would lead out of the box until the root is changed.
            raise OSError(f"/{folder} of the image is a link")
        os.makedirs(f"root/{folder}", exist_ok=True)
    devices = f"mode=755,size=64k,nr_inodes={_DEVICE_FILES}"
    mount("tmpfs", "root/dev", "tmpfs", NO_SUID | NO_EXEC, devices)
    for device in _DEVICES:
        os.close(os.open(f"root/dev/{device}", os.O_CREAT | os.O_WRONLY))
        mount(f"/dev/{device}", f"root/dev/{device}", flags=BIND)
    for folder in ("pts", "shm"):
        os.mkdir(f"root/dev/{folder}")
    options = "newinstance,ptmxmode=0666,mode=620"
    mount("devpts", "root/dev/pts", "devpts", NO_SUID | NO_EXEC, options)
    shared = f"mode=1777,size={shared_memory},nr_inodes={_SHARED_FILES}"
    mount("tmpfs", "root/dev/shm", "tmpfs", NO_SUID | NO_DEVICES, shared)
    os.symlink("pts/ptmx", "root/dev/ptmx")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"root/dev/{name}")
    os.chdir("root")


def make_folder(folder: str) -> None:
    """Create a folder of a box if it is missing.

    Raises:
        BlockedFolder: the folder, or one above it, is something else.
    """
    try:
        if not os.path.isdir(folder):
            os.makedirs(folder)
    except OSError as error:
        if error.errno not in _BLOCKED:
            raise
        raise BlockedFolder(f"`{folder}` is no folder: {error.strerror}") from None


def find_user(user: str) -> tuple[int, int, list[int], str]:
    """Return the user, group, groups and home folder of a user from the box's files; "" is root.

    As in Docker, a group after a colon replaces the user's groups, and an unknown number has group 0 and home `/`.
    """
    name, _, group = user.partition(":")
    uid, gids, home = 0, [0], "/root"
    if name not in ("", "root", "0"):
        row = next((row for row in _rows("/etc/passwd") if len(row) > 3 and name in (row[0], row[2])), None)
        if row is None and not name.isdigit():
            raise OSError(f"the box has no user {user!r}")
        name, uid, gids = (row[0], int(row[2]), [int(row[3])]) if row else ("", int(name), [0])
        home = row[5] if row and len(row) > 5 else "/"
        gids += [int(row[2]) for row in _rows("/etc/group") if name and len(row) > 3 and name in row[3].split(",")]
    if group:
        known = [row[2] for row in _rows("/etc/group") if len(row) > 2 and row[0] == group]
        if not known and not group.isdigit():
            raise OSError(f"the box has no group {group!r}")
        gids = [int((*known, group)[0])]
    return uid, gids[0], gids if uid else gids[1:], home


def _rows(path: str) -> list[list[str]]:
    """Return the rows of a file of users or groups; none if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n").split(":") for line in file]
    except OSError:
        return []
