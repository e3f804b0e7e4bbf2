"""Facts about a node that its drivers need too: folders, records, the environment of a Ray that rlinf started.

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
# Comes before the code that is given to an interpreter: a `json.py` of the working folder is not the one that is meant.
WITHOUT_WORKING_FOLDER = "import sys; sys.path[:] = [p for p in sys.path if p]\n"
# The kernel's limit of a unix socket's path is 107 characters. Ray's take 63 below its folder, whose name has up to 12.
_LONGEST_BASE = 28
# Ray's object store holds arguments and results of calls; messages between workers don't pass through it.
_OBJECT_STORE_BYTES = 512 * 2**20
_SMALLEST_STORE_BYTES = 80 * 2**20


def temporary_folder() -> str:
    """Return the folder for temporary files; /tmp where none can be written, so that whoever writes names it."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return "/tmp"


def private_base() -> str:
    """Return the folder of this user on this machine, in TMPDIR, or in /tmp where TMPDIR is too long for Ray's sockets.

    It need not exist yet.
    """
    private = os.path.join(temporary_folder(), f"rlinf-{os.getuid()}")
    return private if len(private) <= _LONGEST_BASE else os.path.join("/tmp", f"rlinf-{os.getuid()}")


def folder_of(cluster: str) -> str:
    """Return the folder of a cluster on this node."""
    return os.path.join(private_base(), f"up-{cluster}")


def read_record(folder: str) -> dict[str, Any] | None:
    """Return the facts written when the node was started, or None."""
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
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def make_private(folder: str) -> bool:
    """Make a folder unless it exists; return whether it is not a link, and only this user may enter it.

    Raises:
        OSError: it cannot be made.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    info = os.lstat(folder)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


# A raylet begins its object store in a thread, which often is not there when it first looks. It looks again after a
# second, ten times; these are as many seconds in smaller steps.
_STORE_ATTEMPTS: Final = {
    "RAY_raylet_client_num_connect_attempts": "500",
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
}
# An idle Ray takes CPU time for as long as a job runs. Its log monitor looks for new files ten times a second, until
# there are so many; then each half second. Every process times each of its events, for a file that nobody reads.
# At its end a process reports its tasks to the GCS, for which it waits five seconds where the GCS has died.
_IDLE_TUNING: Final = {
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_shutdown_flush_timeout_ms": "500",
}


def ray_environment(owner: str, folder: str, token: str | None) -> dict[str, str]:
    """Return the environment of an embedded Ray; no token disables authentication. It is written into the folder."""
    if token is None:
        return {MARK: owner, "RAY_AUTH_MODE": "disabled", **_STORE_ATTEMPTS, **_IDLE_TUNING}
    path = os.path.join(folder, _TOKEN)
    write_private(path, token)
    return {MARK: owner, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path, **_STORE_ATTEMPTS, **_IDLE_TUNING}


def object_store_bytes() -> int:
    """Return the size of Ray's object store: no more than half of /dev/shm, of which containers often have 64 MB."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return _OBJECT_STORE_BYTES
    return max(_SMALLEST_STORE_BYTES, min(_OBJECT_STORE_BYTES, stat.f_bavail * stat.f_frsize // 2))


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def running(folder: str) -> dict[str, Any] | None:
    """Return the record of a node, with whether its Ray lives and a digest of its token."""
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
    """Return a record without the values of variables, which may be secret."""
    return {name: value for name, value in record.items() if name != "env"}


def machine() -> str:
    """Return what two logins to the same machine have in common, and two machines or containers don't."""
    return "|".join((socket.gethostname(), boot_id(), *(f"{kind}:[{namespace(kind)}]" for kind in ("pid", "net"))))
