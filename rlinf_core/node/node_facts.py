"""Facts about a node that its drivers need, too: folders, records, the environment of rlinf's own Ray.

Travels to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import tempfile
from typing import Any, Final, cast

from rlinf_core.process.proc import MARK, alive, boot_id, namespace

_RECORD = "node.json"
_TOKEN = "token"
# Prepended to code passed to an interpreter, so that it imports nothing (such as a `json.py`) from the working folder.
WITHOUT_WORKING_FOLDER = "import sys; sys.path[:] = [p for p in sys.path if p]\n"
# The path of a unix socket has at most 107 bytes. Ray's sockets take 63 below its folder, whose name has up to 12.
_LONGEST_BASE = 28
# Ray's object store holds only arguments and results of calls; messages between workers don't pass through it.
_OBJECT_STORE_BYTES = 512 * 2**20
_SMALLEST_STORE_BYTES = 80 * 2**20


def temporary_folder() -> str:
    """Return the folder for temporary files; /tmp if none is writable, so that later errors of writing name it."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return "/tmp"


def private_base() -> str:
    """Return this user's folder on this machine, which need not exist: in TMPDIR, or in /tmp if TMPDIR is too long for
    Ray's sockets.
    """
    private = os.path.join(temporary_folder(), f"rlinf-{os.getuid()}")
    return private if len(private) <= _LONGEST_BASE else os.path.join("/tmp", f"rlinf-{os.getuid()}")


def folder_of(cluster: str) -> str:
    """Return the folder of a cluster on this node."""
    return os.path.join(private_base(), f"up-{cluster}")


def read_record(folder: str) -> dict[str, Any] | None:
    """Return the record written when the node was started, or None."""
    try:
        with open(os.path.join(folder, _RECORD), encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", record) if isinstance(record, dict) else None


def write_private(path: str, text: str) -> None:
    """Write a file atomically, readable by this user only."""
    part = f"{path}.{os.getpid()}.{os.urandom(4).hex()}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        os.unlink(part)
        raise


def make_private(folder: str) -> bool:
    """Make a folder unless it exists; return whether it is a folder of this user, no link, and closed to others.

    Raises:
        OSError: it cannot be made.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    info = os.lstat(folder)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


# A raylet starts its object store in a thread, which often is not ready at the first connection attempt. By default it
# retries every second, ten times; this gives the same time in smaller steps.
_STORE_ATTEMPTS: Final = {
    "RAY_raylet_client_num_connect_attempts": "500",
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
}
# By default an idle Ray takes CPU time. Its log monitor looks for new files ten times a second, and from the threshold
# on every half second. Every process times all its events, for an unused file. A process that ends reports its tasks to
# the GCS, and waits five seconds for that if the GCS has died.
_IDLE_TUNING: Final = {
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_shutdown_flush_timeout_ms": "500",
}


def ray_environment(owner: str, folder: str, token: str | None) -> dict[str, str]:
    """Return the environment of rlinf's own Ray, and write `token` into `folder`; None disables authentication."""
    if token is None:
        return {MARK: owner, "RAY_AUTH_MODE": "disabled", **_STORE_ATTEMPTS, **_IDLE_TUNING}
    path = os.path.join(folder, _TOKEN)
    write_private(path, token)
    return {MARK: owner, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path, **_STORE_ATTEMPTS, **_IDLE_TUNING}


def object_store_bytes() -> int:
    """Return the bytes of Ray's object store: half of the free /dev/shm (64 MB in containers), from 80 to 512 MiB."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return _OBJECT_STORE_BYTES
    return max(_SMALLEST_STORE_BYTES, min(_OBJECT_STORE_BYTES, stat.f_bavail * stat.f_frsize // 2))


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def running(folder: str) -> dict[str, Any] | None:
    """Return the record of a node, with `alive` (whether its Ray lives) and a digest of its token."""
    record = read_record(folder)
    if record is None:
        return None
    try:
        with open(os.path.join(folder, _TOKEN), encoding="ascii") as file:
            token = digest_of(file.read().strip())
    except (OSError, ValueError):
        token = None
    return {**without_env(record), "alive": alive(record.get("process")), "token_digest": token}


def without_env(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without its environment variables, which may be secret."""
    return {name: value for name, value in record.items() if name != "env"}


def machine() -> str:
    """Return an identity of this machine or container, the same for all logins to it."""
    return "|".join((socket.gethostname(), boot_id(), *(f"{kind}:[{namespace(kind)}]" for kind in ("pid", "net"))))
