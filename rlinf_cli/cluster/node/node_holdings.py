"""The resources of processes on a node (TCP ports, shared memory, folders), and the removal of leftovers.

Sent to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
from typing import NamedTuple

from rlinf_core.node.node_facts import folder_of, read_record, temporary_folder
from rlinf_core.process import proc
from rlinf_core.process.proc import MARK, command, open_files, pids, read

_LISTEN = "0A"


def command_of(pid: int) -> str | None:
    """Return the command of a process in the form of Ray's records of drivers, or None without such a process."""
    words = command(pid).decode("utf-8", "replace").split("\0")[:-1]
    return subprocess.list2cmdline(words) if os.path.exists(f"/proc/{pid}") else None


class Holdings(NamedTuple):
    """The resources of a cluster's processes besides private memory.

    Attributes:
        ports: the TCP ports on which they listen.
        shared: their files in /dev/shm.
        folders: their folders besides the cluster's own, such as socket folders.
    """

    ports: list[int]
    shared: list[str]
    folders: list[str]


def holdings(processes: list[int], since: float) -> Holdings:
    """Return the current resources of processes, to verify after their end that the resources are gone.

    A shared-memory file older than `since`, or of another user, does not count even if they use it.
    """
    prefix = os.path.join(temporary_folder(), "rlinf-")
    owners = listeners()
    ports = sorted(port for port, pid in owners.items() if pid in set(processes))
    shared: set[str] = set()
    folders: set[str] = set()
    for pid in processes:
        for path in _mapped(pid):
            if path.startswith("/dev/shm/"):
                shared.add(path)
        for target in open_files(pid).values():
            if target.startswith("/dev/shm/") and not target.endswith(" (deleted)"):
                shared.add(target)
            elif target.startswith(prefix) and os.path.isdir(target):
                folders.add(target)
    return Holdings(ports, sorted(path for path in shared if _is_own(path, since)), sorted(folders))


def _is_own(path: str, since: float) -> bool:
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return info.st_uid == os.getuid() and info.st_ctime >= since


def _mapped(pid: int) -> list[str]:
    lines = read(f"/proc/{pid}/maps").decode("utf-8", "replace").splitlines()
    paths = {line.split(None, 5)[5] for line in lines if "/dev/shm/" in line}
    return [path for path in paths if not path.endswith(" (deleted)")]


def listeners() -> dict[int, int]:
    """Return every listening TCP port of this network namespace, with its pid, or 0 if that is not visible."""
    port_of: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in (line.split() for line in read(table).decode("ascii", "replace").splitlines()[1:]):
            if len(row) > 9 and row[3] == _LISTEN:
                port_of[f"socket:[{row[9]}]"] = int(row[1].rpartition(":")[2], 16)
    owner = dict.fromkeys(port_of.values(), 0)
    for pid in pids():
        for target in open_files(pid).values():
            port = port_of.get(target)
            if port is not None:
                owner[port] = pid
    return owner


def described(pid: int) -> str:
    """Return a process in words for messages, as in ``pid 123, `sshd` ``."""
    if not pid:
        return "a process of another user"
    name = read(f"/proc/{pid}/comm").decode("utf-8", "replace").strip()
    return f"pid {pid}, `{name}`" if name else f"pid {pid}"


def cluster_of(pid: int) -> str | None:
    """Return the name of the `rlinf up` cluster to which a process of this user belongs, or None."""
    variables = read(f"/proc/{pid}/environ").split(b"\0")
    mark = f"{MARK}=".encode()
    owners = [os.fsdecode(variable[len(mark) :]) for variable in variables if variable.startswith(mark)]
    # Any process may set the variable, and its value becomes part of a path, so it must be alphanumeric.
    record = read_record(folder_of(owners[0])) if owners and owners[0].isalnum() else None
    name = record.get("name") if record else None
    return name if isinstance(name, str) else None


def answers(address: str, port: int, seconds: float = 0.5) -> OSError | None:
    """Return None if a process accepts connections at the address, else the error."""
    try:
        with socket.create_connection((address, port), timeout=seconds):
            return None
    except OSError as error:
        return error


def remove(path: str) -> str | None:
    """Remove a file or a folder with its contents; return the path if something is left, else None."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
    except OSError:
        pass
    return path if os.path.lexists(path) else None


def reap_sockets() -> None:
    """Remove the socket folders of dead processes; a living process holds a lock on its folder."""
    prefix = f"rlinf-{os.getuid()}-"
    for base in {temporary_folder(), "/tmp"}:
        for name in os.listdir(base):
            path = os.path.join(base, name)
            if not name.startswith(prefix):
                continue
            try:
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                if os.fstat(lock).st_uid != os.getuid():
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            except OSError:
                pass  # its process is alive
            finally:
                os.close(lock)


def tail(path: str, lines: int = 12, size: int = 16384) -> str:
    """Return the last lines of a log."""
    text = proc.tail(path, size)
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
