"""Claims of jobs on devices of this node, which their holders answer for, and which the kernel frees.

A claim is an abstract Unix socket whose name is the user and the device. Only one process can bind it, and the name is
free once all processes have ended that have the socket, however they end: the process that bound it, and the job's
workers on the device, which ask it for a copy. Who connects is told what the holder says of itself, for display alone;
the kernel says which process of which user it is.

Those who share a device bind a name with a suffix. A network namespace has its own names.

Sent to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import array
import hashlib
import json
import os
import re
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from rlinf_core.process.proc import fields

_ASK_SECONDS = 1.0
# For all holders of a node together.
_LIST_SECONDS = 10.0
_MAX_BYTES = 4096
_MAX_NAME = 60
_WHO, _COPY = b"?", b"c"
_PLAIN = re.compile(r"[^A-Za-z0-9.:-]")
_CREDENTIALS = struct.Struct("3i")

# Copies of the sockets of this process's devices: they are closed when it ends.
_copies: list[socket.socket] = []


class HolderInfo(NamedTuple):
    """A process that holds a device, or waits for one.

    Attributes:
        device: the device, as in `NVIDIA:0`; empty for a process that waits.
        pid: the process that bound it, by the kernel.
        user: the id of its user, by the kernel.
        about: what it says of itself; None: it does not answer, or has just begun.
    """

    device: str
    pid: int
    user: int
    about: Mapping[str, Any] | None


class ClaimResult(NamedTuple):
    """The result of an attempt to take devices.

    Attributes:
        names: the name of the socket of each device; empty where one of them was not to be had.
        others: who else holds them.
    """

    names: Mapping[str, str]
    others: Sequence[HolderInfo]

    @property
    def ok(self) -> bool:
        """Whether all were taken."""
        return bool(self.names)


class DeviceHolder:
    """The claims of this process, and its answers about them."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}
        self._about: dict[str, Any] = {}
        self._told = time.monotonic()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._bell, self._ring = _pair()
        os.register_at_fork(after_in_child=self._forget)

    def take(self, devices: Iterable[str], *, share: bool = False, siblings: bool = False) -> ClaimResult:
        """Take all of these devices, or none.

        Args:
            devices: the devices, as in `NVIDIA:0`; those that it has stay.
            share: whether to take them also where others hold them.
            siblings: whether to share them with processes of the same parent.
        """
        wanted = list(dict.fromkeys(devices))
        with self._lock:
            got: dict[str, tuple[str, socket.socket]] = {}
            taken = True
            for device in wanted:
                name = claim_name(device)
                if any(_device_name(own) == name for own in self._sockets):
                    continue
                sock = _bind(name)
                if sock is None or _shared(name):
                    if not share and not (siblings and _all_siblings(name)):
                        if sock is not None:
                            sock.close()
                        taken = False
                        break
                    if sock is None:
                        name = f"{name}+{os.getpid()}-{secrets.token_hex(4)}"
                        sock = _bind(name)
                if sock is not None:
                    got[device] = name, sock
            if taken:
                self._hold(dict(got.values()))
            else:
                for _, sock in got.values():
                    sock.close()
            own = {_device_name(name): name for name in self._sockets}
            names = {device: own[claim_name(device)] for device in wanted if claim_name(device) in own}
        others = [one for one in holders(wanted) if one.pid != os.getpid()] if share or not taken else []
        return ClaimResult(names if taken else {}, others)

    def wait(self) -> None:
        """Let others see that this process waits; what it tells says for what."""
        name = f"{_prefix('wait')}{os.getpid()}-{secrets.token_hex(4)}"
        sock = _bind(name)
        with self._lock:
            if sock is not None:
                self._hold({name: sock})

    def stop_waiting(self) -> None:
        """Take the sign that it waits back."""
        prefix = _prefix("wait")
        with self._lock:
            for name in [name for name in self._sockets if name.startswith(prefix)]:
                self._sockets.pop(name).close()
        self._wake()

    def tell(self, about: Mapping[str, Any]) -> None:
        """Set what askers are told. Seconds that are `left` pass from now on."""
        with self._lock:
            self._about, self._told = dict(about), time.monotonic()

    def drop(self, devices: Iterable[str] | None = None) -> None:
        """Give devices back; None: all, and the sign that it waits."""
        names = None if devices is None else set(map(claim_name, devices))
        with self._lock:
            for name in [name for name in self._sockets if names is None or _device_name(name) in names]:
                self._sockets.pop(name).close()
        self._wake()

    def _hold(self, sockets: Mapping[str, socket.socket]) -> None:
        for sock in sockets.values():
            sock.listen(64)
        self._sockets.update(sockets)
        if self._thread is None and self._sockets:
            self._thread = threading.Thread(target=self._serve, name="rlinf-claims", daemon=True)
            self._thread.start()
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):
            self._ring.send(b".")

    def _serve(self) -> None:
        while True:
            with self._lock:
                by_descriptor = {sock.fileno(): sock for sock in self._sockets.values()}
            poll = select.poll()
            for descriptor in (self._bell.fileno(), *by_descriptor):
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll():
                if descriptor == self._bell.fileno():
                    with suppress(OSError):
                        self._bell.recv(_MAX_BYTES)
                elif descriptor in by_descriptor:
                    # It may have been closed since, or the asker have gone.
                    with suppress(OSError, ValueError):
                        self._answer(by_descriptor[descriptor])

    def _answer(self, sock: socket.socket) -> None:
        """Answer one asker of this user; what it does not take within a second is not repeated."""
        connection, _ = sock.accept()
        with connection:
            connection.settimeout(_ASK_SECONDS)
            if _peer(connection)[1] != os.getuid():
                return
            question = connection.recv(16)
            with self._lock:
                about = dict(self._about)
                if isinstance(about.get("left"), float):
                    about["left"] = max(0.0, about["left"] - (time.monotonic() - self._told))
            text = json.dumps(about).encode()
            text = text if len(text) <= _MAX_BYTES else b"{}"
            copy = array.array("i", [sock.fileno()])
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, copy)] if question == _COPY else []
            connection.sendmsg([text], extra)

    def _forget(self) -> None:
        """In a forked child, which is no part of the claim: leave it to the parent."""
        for sock in (*self._sockets.values(), self._bell, self._ring):
            sock.close()
        self._sockets, self._thread, self._lock = {}, None, threading.Lock()
        self._bell, self._ring = _pair()


def claim_name(device: str) -> str:
    """Return the name of the socket of a device for this user."""
    plain = _PLAIN.sub("_", device)
    if plain != device or len(plain) > _MAX_NAME:
        plain = f"{plain[: _MAX_NAME - 17]}-{hashlib.sha256(device.encode()).hexdigest()[:16]}"
    return _prefix("claim") + plain


def holders(devices: Iterable[str]) -> list[HolderInfo]:
    """Return who holds these devices, each holder of each device."""
    by_name = {claim_name(device): device for device in devices}
    names = [name for name in _bound(_prefix("claim")) if _device_name(name) in by_name]
    return _ask_all({name: by_name[_device_name(name)] for name in names})


def listing() -> dict[str, list[dict[str, Any]]]:
    """Return who holds devices of this node, and who waits, as data: `claims` and `waiting`."""
    claim, wait = _prefix("claim"), _prefix("wait")
    held = _ask_all({name: _device_name(name)[len(claim) :] for name in _bound(claim)})
    waiting = _ask_all(dict.fromkeys(_bound(wait), ""))
    return {"claims": [one._asdict() for one in held], "waiting": [one._asdict() for one in waiting]}


def keep(names: Iterable[str]) -> None:
    """Keep copies of the claims of this process's job until this process ends. One that cannot be had is left out."""
    for name in names:
        with suppress(OSError):
            with _connected(name) as connection:
                if _peer(connection)[1] != os.getuid():
                    continue
                connection.send(_COPY)
                room = socket.CMSG_SPACE(array.array("i").itemsize)
                _, extra, _, _ = connection.recvmsg(_MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in extra:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    copies = array.array("i")
                    copies.frombytes(data[: copies.itemsize])
                    _copies.append(socket.socket(fileno=copies[0]))


def _prefix(kind: str) -> str:
    return f"rlinf-{kind}-{os.getuid()}-"


def _device_name(name: str) -> str:
    """Return the name of the device's own socket for that of one who shares it."""
    return name.partition("+")[0]


def _bind(name: str) -> socket.socket | None:
    """Return a socket of this name; None: it is taken."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.bind(f"\0{name}")
    except OSError:
        sock.close()
        return None
    return sock


def _bound(prefix: str) -> list[str]:
    """Return the names with this prefix that processes of this network namespace have bound, in order."""
    names: set[str] = set()
    with suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        for line in file:
            path = line.rstrip("\n").rpartition(" ")[2]
            if path.startswith(f"@{prefix}"):
                names.add(path[1:])
    return sorted(names)


def _shared(name: str) -> bool:
    """Return whether a process shares the device of this name."""
    return bool(_bound(f"{name}+"))


def _all_siblings(name: str) -> bool:
    """Return whether all who hold the device of this name are children of this process's parent."""
    # By the kernel's word alone: none is asked, as it may be asking this one.
    peers = [_ask(other, "", listen=False) for other in _bound(name) if _device_name(other) == name]
    own = str(os.getppid())
    pids = [one.pid for one in peers if one is not None]
    return bool(pids) and all(fields(f"/proc/{pid}/status").get("PPid") == own for pid in pids)


def _ask_all(devices: Mapping[str, str]) -> list[HolderInfo]:
    """Return the holders of names, in bounded time; without those that have gone."""
    end = time.monotonic() + _LIST_SECONDS
    asked = [_ask(name, device, listen=time.monotonic() < end) for name, device in devices.items()]
    return [one for one in asked if one is not None]


def _ask(name: str, device: str, *, listen: bool) -> HolderInfo | None:
    """Return who holds a name, and what it says of itself; None: nobody does any more."""
    pid, user, about = 0, os.getuid(), None
    try:
        with _connected(name) as connection:
            pid, user = _peer(connection)
            if listen and user == os.getuid():
                connection.send(_WHO)
                about = _read(connection.recv(_MAX_BYTES + 1))
    except ConnectionRefusedError:
        # Nobody listens: it has just ended, or has just begun.
        if name not in _bound(name):
            return None
    except OSError:
        pass
    return HolderInfo(device, pid, user, about)


def _read(text: bytes) -> Mapping[str, Any] | None:
    """Return an answer; None for one that is too long, empty or no object."""
    try:
        about: Any = json.loads(text) if len(text) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", about) if isinstance(about, dict) and about else None


def _connected(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_ASK_SECONDS)
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        raise
    return connection


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process at the other end and its user, by the kernel."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user


def _pair() -> tuple[socket.socket, socket.socket]:
    bell, ring = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    bell.setblocking(False)
    ring.setblocking(False)
    return bell, ring
