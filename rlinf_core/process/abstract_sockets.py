"""Abstract Unix sockets (unix(7)): names in a network namespace, each bound by one process until the kernel frees it.

Any user can bind any name; the kernel tells which user made a socket.

Travels to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import suppress

from rlinf_core.process.proc import peer_credentials

_ASK_SECONDS = 1.0
_MAX_BYTES = 4096
# The formats of sock_diag(7): a header, then the request; the reply has a header, then attributes.
_HEADER, _REQUEST = struct.Struct("=IHHII"), struct.Struct("=BBHIIIII")
_SOCK_DIAG, _BY_FAMILY, _IS_REQUEST, _SHOW_USER, _USER = 4, 20, 1, 0x40, 7
_ATTRIBUTES_AT = _HEADER.size + 16


def bind(name: str) -> socket.socket | None:
    """Return a socket bound to this name; None if the name is taken.

    Raises:
        OSError: the bind failed for another reason.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.bind(f"\0{name}")
    except OSError as error:
        sock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return sock


def bound(prefix: str) -> list[str]:
    """Return the names with this prefix that this user's processes have bound in this network namespace, sorted."""
    names: set[str] = set()
    with suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        for line in file:
            head, _, path = line.rstrip("\n").rpartition(" ")
            if path.startswith(f"@{prefix}") and path[1:] not in names and _is_own(path[1:], head.rpartition(" ")[2]):
                names.add(path[1:])
    return sorted(names)


def _is_own(name: str, number: str) -> bool:
    """Return whether this user made the socket with this inode number; True if the kernel does not tell."""
    user = _owner(int(number)) if number.isdecimal() else None
    if user is None:
        # The kernel is older than 5.3, or this is a sandbox.
        with suppress(OSError), connected(name, _ASK_SECONDS) as connection:
            user = peer_credentials(connection)[1]
    return user in (None, os.getuid())


def _owner(number: int) -> int | None:
    """Return the uid of the maker of a Unix socket, by sock_diag(7); None if the kernel does not tell."""
    request = _REQUEST.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, number, _SHOW_USER, 0xFFFFFFFF, 0xFFFFFFFF)
    header = _HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _IS_REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(_ASK_SECONDS)
            kernel.send(header + request)
            data = kernel.recv(_MAX_BYTES)
    except OSError:
        return None
    at = _ATTRIBUTES_AT if len(data) >= _HEADER.size and _HEADER.unpack_from(data)[1] == _BY_FAMILY else len(data)
    while at + 8 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        if kind == _USER:
            return int(struct.unpack_from("=I", data, at + 4)[0])
        at += max(4, (size + 3) & ~3)
    return None


def connected(name: str, seconds: float) -> socket.socket:
    """Return a connection to the process that listens at a name.

    Raises:
        OSError: no process listens there, or it does not accept in time.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(seconds)
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        raise
    return connection
