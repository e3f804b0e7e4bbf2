"""Claims of jobs on devices of this node, which their holders answer for, and which the kernel frees.

A claim is an abstract Unix socket whose name is the user and the device. Only one process can bind it, and the name is
free once all processes have ended that have the socket, however they end: the process that bound it, and the job's
workers on the device, which ask it for a copy. Who connects is told what the holder says of itself, for display alone;
the kernel says which process of which user it is.

Anybody can bind any name: a socket counts only if the kernel says that this user made it. Those who share a device bind
a name with a suffix, and so does a job whose name another user has bound. Who binds looks for others only then: of two
that do so at once, one sees the other. A network namespace has its own names.

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

from rlinf_core.process.abstract_sockets import bind, bound, connected
from rlinf_core.process.proc import peer_credentials, stat

_ASK_SECONDS = 1.0
# For all holders of a node together.
_LIST_SECONDS = 10.0
# Many workers may ask a busy driver for their copies at once.
_KEEP_SECONDS = 30.0
_PAUSE_SECONDS = 0.1
_WAITING_ASKERS = 1024
_MAX_BYTES = 4096
_MAX_NAME = 60
_WHO, _COPY, _TAKE = b"?", b"c", b"t"
# What people call the device, in an answer.
LABEL = "label"
_PLAIN = re.compile(r"[^A-Za-z0-9.:-]")

# Copies of the sockets of this process's devices: they are closed when it ends.
_copies: list[socket.socket] = []


class HolderInfo(NamedTuple):
    """A process that holds a device, or waits for one.

    Attributes:
        device: the device, as in `NVIDIA:GPU-5d5b`; empty for a process that waits.
        pid: the process that bound it, by the kernel.
        user: the id of its user, by the kernel: this user's on that node.
        about: what it says of itself; None: it does not answer, or has just begun.
        stopped: whether it does not answer since it is stopped, as by Ctrl-Z.
    """

    device: str
    pid: int
    user: int
    about: Mapping[str, Any] | None
    stopped: bool = False


class ClaimResult(NamedTuple):
    """The result of an attempt to take devices.

    Attributes:
        names: the name of the socket of each device; empty where one of them was not to be had.
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
        # By the name of the device's socket.
        self._labels: dict[str, str] = {}
        self._about_since = time.monotonic()
        self._lock = threading.Lock()
        # Held by who takes devices: questions of others are answered meanwhile.
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
            devices: the devices, as in `NVIDIA:GPU-5d5b`; those that it has stay.
            share: whether to take them also where others hold them.
            group: share them with those who name this group, and with nobody else; empty: with nobody.
            labels: what people call devices, which askers are told.

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
        """Take claims over from another process of this job, which gives them up: they are free at no moment.

        Args:
            names: the names of the sockets, by device.
            pid: the process that holds them, as the kernel must say, too.
            labels: see `take`.

        Returns:
            The devices whose claims it has now.
        """
        end = time.monotonic() + _KEEP_SECONDS
        copies = {name: _copy_of(name, _TAKE, end, pid) for name in names.values()}
        got = {name: sock for name, sock in copies.items() if sock is not None}
        with self._lock:
            self._labels.update({claim_name(device): label for device, label in labels.items()})
            # Who listens last is the process that the kernel names.
            self._hold(got)
        return [device for device, name in names.items() if name in got]

    def when_empty(self, do: Callable[[], None]) -> None:
        """Call a function, in a thread, once this process holds nothing more."""
        with self._lock:
            self._when_empty = do
        self._wake()

    def look(self, devices: Iterable[str], *, group: str = "") -> list[HolderInfo]:
        """Return who else holds these devices, and takes nothing; without those of this group."""
        with self._lock:
            own = set(self._sockets)
        return holders(devices, without=own, group=group)

    def _names(self) -> dict[str, str]:
        """Return the name of each claim by that of its device."""
        with self._lock:
            return {_device_name(name): name for name in self._sockets}

    def wait(self) -> None:
        """Let others see that this process waits; what it tells says for what."""
        name = f"{_prefix('wait')}{os.getpid()}-{secrets.token_hex(4)}"
        sock = bind(name)
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
            self._about, self._about_since = dict(about), time.monotonic()

    def drop(self, devices: Iterable[str] | None = None) -> None:
        """Give devices back; None: all, and the sign that it waits."""
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
                    # It may have been closed since, or the asker have gone.
                    with suppress(OSError, ValueError):
                        self._answer(*by_descriptor[descriptor])

    def _answer(self, name: str, sock: socket.socket) -> None:
        """Answer one asker of this user; what it does not take within a second is not repeated."""
        try:
            connection, _ = sock.accept()
        except OSError:
            # As where this process has no descriptor left: the asker stays in line.
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
                        # It takes longer than it was to, nobody knows how long.
                        del about["left"]
            # Who has nothing to say of itself has just begun.
            text = json.dumps({**about, LABEL: label} if about and label else about).encode()
            text = text if len(text) <= _MAX_BYTES else b"{}"
            copy = array.array("i", [sock.fileno()])
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, copy)] if question in (_COPY, _TAKE) else []
            connection.sendmsg([text], extra)
        if question == _TAKE:
            with self._lock:
                self._sockets.pop(name, sock).close()

    def _forget(self) -> None:
        """In a forked child, which is no part of the claim: leave it to the parent."""
        for sock in (*self._sockets.values(), self._bell, self._ring):
            sock.close()
        self._sockets, self._thread, self._lock, self._taking = {}, None, threading.Lock(), threading.Lock()
        self._when_empty = None
        self._bell, self._ring = _pair()


def claim_name(device: str) -> str:
    """Return the name of the socket of a device for this user."""
    plain = _PLAIN.sub("_", device)
    if plain != device or len(plain) > _MAX_NAME:
        plain = f"{plain[: _MAX_NAME - 17]}-{hashlib.sha256(device.encode()).hexdigest()[:16]}"
    return _prefix("claim") + plain


def holders(devices: Iterable[str], *, without: Collection[str] = (), group: str = "") -> list[HolderInfo]:
    """Return who holds these devices, each holder of each device, but for sockets of these names and of this group."""
    by_name = {claim_name(device): device for device in devices}
    names = [name for name in bound(_prefix("claim")) if _device_name(name) in by_name]
    names = [name for name in names if name not in without and not _of_group(name, group)]
    return _ask_all({name: by_name[_device_name(name)] for name in names})


def listing() -> dict[str, list[dict[str, Any]]]:
    """Return who holds devices of this node, and who waits, as data: `claims` and `waiting`."""
    claim, wait = _prefix("claim"), _prefix("wait")
    held = _ask_all({name: _device_name(name)[len(claim) :] for name in bound(claim)})
    waiting = _ask_all(dict.fromkeys(bound(wait), ""))
    return {"claims": [one._asdict() for one in held], "waiting": [one._asdict() for one in waiting]}


def keep(names: Iterable[str], *, seconds: float = _KEEP_SECONDS) -> list[str]:
    """Keep copies of the claims of this process's job until this process ends.

    Returns:
        The names of those that could not be had.
    """
    end = time.monotonic() + seconds
    copies = {name: _copy_of(name, _COPY, end) for name in names}
    _copies.extend(sock for sock in copies.values() if sock is not None)
    return [name for name, sock in copies.items() if sock is None]


def _copy_of(name: str, question: bytes, end: float, pid: int | None = None) -> socket.socket | None:
    """Return a copy of a claim, of this process alone if one is named; None: its holder gave none.

    A busy one is asked again until `end`.
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
    """Return the name of the device's own socket for that of one who shares it."""
    return name.partition("+")[0]


def _of_group(name: str, group: str) -> bool:
    return bool(group) and name.partition("+")[2].startswith(f"{_tag(group)}-")


def _tag(group: str) -> str:
    return hashlib.sha256(group.encode()).hexdigest()[:8] if group else "x"


def _claimed(device: str, *, share: bool, group: str) -> tuple[str, socket.socket] | None:
    """Bind a name for the device of this name; None: another process of this user has one. Closed, it is free again."""

    def others(own: str = "") -> list[str]:
        names = [name for name in bound(device) if _device_name(name) == device]
        return [] if share else [name for name in names if name != own and not _of_group(name, group)]

    if others():
        return None
    name, sock = device, None if group else bind(device)
    if sock is None:
        # Of two that come at once, the one without the plain name yields. It is only free where another user has it.
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
    """Return the holders of names, in bounded time; without those that have gone."""
    end = time.monotonic() + _LIST_SECONDS
    asked: list[HolderInfo] = []
    # One that is stopped is waited for once, not for each of its devices.
    silent: set[int] = set()
    for name, device in devices.items():
        one = _ask(name, device, silent, listen=time.monotonic() < end)
        if one is not None:
            asked.append(one)
    return asked


def _ask(name: str, device: str, silent: set[int], *, listen: bool) -> HolderInfo | None:
    """Return who holds a name, and what it says about itself; None: no one holds it now."""
    pid, user, about = 0, os.getuid(), None
    try:
        with connected(name, _ASK_SECONDS) as connection:
            pid, user = peer_credentials(connection)
            if listen and user == os.getuid() and pid not in silent:
                connection.send(_WHO)
                about = _read(connection.recv(_MAX_BYTES + 1))
    except ConnectionRefusedError:
        # Nobody listens: it has just ended, or has just begun.
        if name not in bound(name):
            return None
    except OSError:
        silent.add(pid)
    return HolderInfo(device, pid, user, about, about is None and pid > 0 and stat(pid).is_stopped)


def _read(text: bytes) -> Mapping[str, Any] | None:
    """Return an answer; None for one that is too long, empty or no object."""
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
