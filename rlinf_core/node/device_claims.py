"""Claims of jobs on devices of this node; their holders answer questions about them, and the kernel frees them.

A claim is an abstract Unix socket named after the user and the device. Only one process can bind it. The kernel frees
the name when all processes with the socket have ended, in whatever way: the process that bound it, and the job's
workers on the device, which get copies of it. A process that connects gets the holder's description of itself, for
display only; the kernel tells the holder's pid and user.

Any user can bind any name, so a socket counts only if the kernel tells that this user made it. Jobs that share a device
bind names with a suffix, and so does a job whose plain name another user has bound. A job checks for others after it
has bound: of two that bind at once, at least one sees the other. A network namespace has its own names.

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
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from rlinf_core.process.proc import bind, bound, connected, peer_credentials, stat

_ASK_SECONDS = 1.0
# The time limit for asking all holders of a node.
_LIST_SECONDS = 10.0
# The time limit for a copy: many workers may ask a busy driver at once.
_KEEP_SECONDS = 30.0
_PAUSE_SECONDS = 0.1
_WAITING_ASKERS = 1024
_MAX_BYTES = 4096
_MAX_NAME = 60
_WHO, _COPY, _TAKE = b"?", b"c", b"t"
# The key, in a reply, of the device's readable name.
LABEL = "label"
_PLAIN = re.compile(r"[^A-Za-z0-9.:-]")

# Copies of the sockets of this process's devices, which stay open until it ends.
_copies: list[socket.socket] = []


class HolderInfo(NamedTuple):
    """A process that holds a device, or waits for one.

    Attributes:
        device: the device, for example `NVIDIA:GPU-5d5b`; empty for a process that waits.
        pid: the pid of the process that bound the socket, as the kernel tells.
        user: the uid of that process, as the kernel tells: this user's on that node.
        about: its description of itself; None if it does not answer, or has just begun.
        stopped: whether it does not answer because it is stopped, for example by Ctrl-Z.
    """

    device: str
    pid: int
    user: int
    about: Mapping[str, Any] | None
    stopped: bool = False


class ClaimResult(NamedTuple):
    """The result of an attempt to take devices.

    Attributes:
        names: the name of the socket by device; empty if a device could not be taken.
        others: the other holders of the devices, if the devices are shared or could not be taken.
    """

    names: Mapping[str, str]
    others: Sequence[HolderInfo]

    @property
    def ok(self) -> bool:
        """Whether all devices were taken."""
        return bool(self.names)


class DeviceHolder:
    """The claims of this process, and the thread that answers questions about them."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}
        self._about: dict[str, Any] = {}
        # By the name of the device's socket.
        self._labels: dict[str, str] = {}
        self._about_since = time.monotonic()
        self._lock = threading.Lock()
        # Held while devices are taken; apart from `_lock`, so that questions of others are answered meanwhile.
        self._taking = threading.Lock()
        self._thread: threading.Thread | None = None
        self._when_empty: Callable[[], None] | None = None
        self._bell, self._ring = _pair()
        os.register_at_fork(after_in_child=self._forget)

    def take(
        self,
        devices: Iterable[str],
        *,
        share: bool = False,
        group: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> ClaimResult:
        """Take all of these devices, or none.

        Args:
            devices: the devices, for example `NVIDIA:GPU-5d5b`; devices that it holds already stay.
            share: whether to take devices that others hold, too.
            group: the group with which to share them: other jobs that name it, and no others; empty: no sharing.
            labels: the readable names of devices, for replies to questions.

        Raises:
            OSError: the kernel makes no socket of this name.
        """
        wanted = list(dict.fromkeys(devices))
        with self._taking:
            own = self._names()
            got: dict[str, socket.socket] = {}
            taken = True
            try:
                for device in wanted:
                    if claim_name(device) in own:
                        continue
                    claim = _claimed(claim_name(device), share=share, group=group)
                    if claim is None:
                        taken = False
                        break
                    got[claim[0]] = claim[1]
                if taken:
                    with self._lock:
                        self._labels.update({claim_name(name): label for name, label in (labels or {}).items()})
                        self._hold(got)
                    got = {}
            finally:
                for sock in got.values():
                    sock.close()
            own = self._names()
        others = self.look(wanted) if share or not taken else []
        return ClaimResult({device: own[claim_name(device)] for device in wanted} if taken else {}, others)

    def adopt(self, names: Mapping[str, str], pid: int, labels: Mapping[str, str]) -> list[str]:
        """Take claims over from another process of this job, so that they are never free in between.

        Args:
            names: the names of the sockets, by device.
            pid: the process that holds them, which the kernel must confirm.
            labels: see `take`.

        Returns:
            The devices whose claims were taken over.
        """
        end = time.monotonic() + _KEEP_SECONDS
        copies = {name: _copy_of(name, _TAKE, end, pid) for name in names.values()}
        got = {name: sock for name, sock in copies.items() if sock is not None}
        with self._lock:
            self._labels.update({claim_name(device): label for device, label in labels.items()})
            # `listen` makes the kernel name this process as the holder.
            self._hold(got)
        return [device for device, name in names.items() if name in got]

    def when_empty(self, do: Callable[[], None]) -> None:
        """Call a function, in the answering thread, once this process holds no claims."""
        with self._lock:
            self._when_empty = do
        self._wake()

    def look(self, devices: Iterable[str], *, group: str = "") -> list[HolderInfo]:
        """Return the other holders of these devices, without those of this group."""
        with self._lock:
            own = set(self._sockets)
        return holders(devices, without=own, group=group)

    def _names(self) -> dict[str, str]:
        """Return the names of claims, by the plain name of their device."""
        with self._lock:
            return {_device_name(name): name for name in self._sockets}

    def wait(self) -> None:
        """Show others that this process waits; `tell` sets the description of the wait."""
        name = f"{_prefix('wait')}{os.getpid()}-{secrets.token_hex(4)}"
        sock = bind(name)
        with self._lock:
            if sock is not None:
                self._hold({name: sock})

    def stop_waiting(self) -> None:
        """Stop showing that this process waits."""
        prefix = _prefix("wait")
        with self._lock:
            for name in [name for name in self._sockets if name.startswith(prefix)]:
                self._sockets.pop(name).close()
        self._wake()

    def tell(self, about: Mapping[str, Any]) -> None:
        """Set the reply to questions. Its seconds `left` count down from now on."""
        with self._lock:
            self._about, self._about_since = dict(about), time.monotonic()

    def drop(self, devices: Iterable[str] | None = None) -> None:
        """Release claims on devices; with None all of them, and stop showing that this process waits."""
        names = None if devices is None else set(map(claim_name, devices))
        with self._lock:
            for name in [name for name in self._sockets if names is None or _device_name(name) in names]:
                self._sockets.pop(name).close()
        self._wake()

    def _hold(self, sockets: Mapping[str, socket.socket]) -> None:
        for sock in sockets.values():
            sock.listen(_WAITING_ASKERS)
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
                by_descriptor = {sock.fileno(): (name, sock) for name, sock in self._sockets.items()}
                ended = self._when_empty
            if ended is not None and not by_descriptor:
                ended()
            poll = select.poll()
            for descriptor in (self._bell.fileno(), *by_descriptor):
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll():
                if descriptor == self._bell.fileno():
                    with suppress(OSError):
                        self._bell.recv(_MAX_BYTES)
                elif descriptor in by_descriptor:
                    # The socket may be closed by now, or the asker gone.
                    with suppress(OSError, ValueError):
                        self._answer(*by_descriptor[descriptor])

    def _answer(self, name: str, sock: socket.socket) -> None:
        """Answer one asker of this user, if it takes the reply within a second."""
        try:
            connection, _ = sock.accept()
        except OSError:
            # For example, this process has no descriptor left: the asker stays queued.
            time.sleep(_PAUSE_SECONDS)
            return
        with connection:
            connection.settimeout(_ASK_SECONDS)
            if peer_credentials(connection)[1] != os.getuid():
                return
            question = connection.recv(16)
            with self._lock:
                about = dict(self._about)
                label = self._labels.get(_device_name(name))
                if isinstance(about.get("left"), float):
                    about["left"] -= time.monotonic() - self._about_since
                    if about["left"] <= 0:
                        # The job takes longer than estimated, so the time left is unknown.
                        del about["left"]
            # An empty reply means that the job has just begun.
            text = json.dumps({**about, LABEL: label} if about and label else about).encode()
            text = text if len(text) <= _MAX_BYTES else b"{}"
            copy = array.array("i", [sock.fileno()])
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, copy)] if question in (_COPY, _TAKE) else []
            connection.sendmsg([text], extra)
        if question == _TAKE:
            with self._lock:
                self._sockets.pop(name, sock).close()

    def _forget(self) -> None:
        """Give up all claims in a forked child, which leaves them to its parent."""
        for sock in (*self._sockets.values(), self._bell, self._ring):
            sock.close()
        self._sockets, self._thread, self._lock, self._taking = {}, None, threading.Lock(), threading.Lock()
        self._when_empty = None
        self._bell, self._ring = _pair()


def claim_name(device: str) -> str:
    """Return the plain socket name of a device for this user."""
    plain = _PLAIN.sub("_", device)
    if plain != device or len(plain) > _MAX_NAME:
        plain = f"{plain[: _MAX_NAME - 17]}-{hashlib.sha256(device.encode()).hexdigest()[:16]}"
    return _prefix("claim") + plain


def holders(devices: Iterable[str], *, without: Collection[str] = (), group: str = "") -> list[HolderInfo]:
    """Return each holder of each of these devices, except the sockets named in `without` and those of `group`."""
    by_name = {claim_name(device): device for device in devices}
    names = [name for name in bound(_prefix("claim")) if _device_name(name) in by_name]
    names = [name for name in names if name not in without and not _of_group(name, group)]
    return _ask_all({name: by_name[_device_name(name)] for name in names})


def listing() -> dict[str, list[dict[str, Any]]]:
    """Return the holders of devices of this node, and the waiting processes, as data: `claims` and `waiting`."""
    claim, wait = _prefix("claim"), _prefix("wait")
    held = _ask_all({name: _device_name(name)[len(claim) :] for name in bound(claim)})
    waiting = _ask_all(dict.fromkeys(bound(wait), ""))
    return {"claims": [one._asdict() for one in held], "waiting": [one._asdict() for one in waiting]}


def keep(names: Iterable[str], *, seconds: float = _KEEP_SECONDS) -> list[str]:
    """Keep copies of the claims of this process's job until this process ends.

    Returns:
        The names of the claims of which it got no copy.
    """
    end = time.monotonic() + seconds
    copies = {name: _copy_of(name, _COPY, end) for name in names}
    _copies.extend(sock for sock in copies.values() if sock is not None)
    return [name for name, sock in copies.items() if sock is None]


def _copy_of(name: str, question: bytes, end: float, pid: int | None = None) -> socket.socket | None:
    """Return a copy of a claim, or None if its holder gives none or is not `pid`, if that is given.

    A busy holder is asked again until `end` (monotonic).
    """
    while True:
        try:
            with connected(name, max(_ASK_SECONDS, end - time.monotonic())) as connection:
                holder, user = peer_credentials(connection)
                if user != os.getuid() or pid not in (None, holder):
                    return None
                connection.send(question)
                room = socket.CMSG_SPACE(array.array("i").itemsize)
                _, extra, _, _ = connection.recvmsg(_MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
            break
        except ConnectionRefusedError:
            return None
        except OSError:
            if time.monotonic() >= end:
                return None
            time.sleep(_PAUSE_SECONDS)
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            copies = array.array("i")
            copies.frombytes(data[: copies.itemsize])
            return socket.socket(fileno=copies[0])
    return None


def _prefix(kind: str) -> str:
    return f"rlinf-{kind}-{os.getuid()}-"


def _device_name(name: str) -> str:
    """Return the plain name of the device, given the name of any of its sockets."""
    return name.partition("+")[0]


def _of_group(name: str, group: str) -> bool:
    return bool(group) and name.partition("+")[2].startswith(f"{_tag(group)}-")


def _tag(group: str) -> str:
    return hashlib.sha256(group.encode()).hexdigest()[:8] if group else "x"


def _claimed(device: str, *, share: bool, group: str) -> tuple[str, socket.socket] | None:
    """Bind a name for the device with this plain name; None if another process of this user has the device."""

    def others(own: str = "") -> list[str]:
        names = [name for name in bound(device) if _device_name(name) == device]
        return [] if share else [name for name in names if name != own and not _of_group(name, group)]

    if others():
        return None
    name, sock = device, None if group else bind(device)
    if sock is None:
        # If another process of this user has just bound the plain name, this one yields. Else another user has it.
        if others():
            return None
        name = f"{device}+{_tag(group)}-{secrets.token_hex(4)}"
        sock = bind(name)
    if sock is None:
        return None
    try:
        taken = bool(others(name))
    except BaseException:
        sock.close()
        raise
    if taken:
        sock.close()
        return None
    return name, sock


def _ask_all(devices: Mapping[str, str]) -> list[HolderInfo]:
    """Return the holders of names, in bounded time, without those that have ended."""
    end = time.monotonic() + _LIST_SECONDS
    asked: list[HolderInfo] = []
    # A stopped holder is waited for once, not for each of its devices.
    silent: set[int] = set()
    for name, device in devices.items():
        one = _ask(name, device, silent, listen=time.monotonic() < end)
        if one is not None:
            asked.append(one)
    return asked


def _ask(name: str, device: str, silent: set[int], *, listen: bool) -> HolderInfo | None:
    """Return the holder of a name and its description of itself; None if the name is free now."""
    pid, user, about = 0, os.getuid(), None
    try:
        with connected(name, _ASK_SECONDS) as connection:
            pid, user = peer_credentials(connection)
            if listen and user == os.getuid() and pid not in silent:
                connection.send(_WHO)
                about = _read(connection.recv(_MAX_BYTES + 1))
    except ConnectionRefusedError:
        # The holder does not listen: it has just ended, or has just begun.
        if name not in bound(name):
            return None
    except OSError:
        silent.add(pid)
    return HolderInfo(device, pid, user, about, about is None and pid > 0 and stat(pid).is_stopped)


def _read(text: bytes) -> Mapping[str, Any] | None:
    """Return a parsed reply; None if it is too long, empty or not an object."""
    try:
        about: Any = json.loads(text) if len(text) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", about) if isinstance(about, dict) and about else None


def _pair() -> tuple[socket.socket, socket.socket]:
    bell, ring = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    bell.setblocking(False)
    ring.setblocking(False)
    return bell, ring
