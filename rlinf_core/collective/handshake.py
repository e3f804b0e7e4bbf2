"""Listening sockets, and the handshake: both ends of a connection prove that they know the cluster's secret before
anything else is read.

    dialer -> acceptor   greeting, nonce
    acceptor -> dialer   greeting, nonce
    dialer -> acceptor   proof over both nonces and its identity, identity
    acceptor -> dialer   verdict, proof over both nonces and both identities, identity

The dialer proves first, so that a stranger learns only that the port is open. Both nonces are fresh, so recorded
proofs cannot be replayed. A proof covers the role, so a proof cannot be reflected to its sender. Identities are JSON:
nothing is unpickled here.

A stranger holds a thread for a few seconds at most, and the number of strangers is bounded: the oldest connection of
the address that has the most is closed for the next one, so strangers cannot keep members out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import logging
import os
import random
import secrets
import select
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path

from rlinf_core import env_vars
from rlinf_core.errors import AuthenticationError, ClusterError
from rlinf_core.foreign.strangers import LimitedWarnings, Unproven, origin_of
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.process.proc import peer_credentials


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """The shared secret with which the processes of a cluster prove membership. Its repr omits the key."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < 16:
            raise ValueError("a cluster's secret needs at least 16 bytes")

    @classmethod
    def generate(cls) -> ClusterSecret:
        return cls(secrets.token_bytes(32))

    def sign(self, *fields: bytes) -> bytes:
        """Return a 32-byte MAC over the length-prefixed fields."""
        mac = hmac.new(self.key, digestmod=hashlib.sha256)
        for part in fields:
            mac.update(len(part).to_bytes(4, "big"))
            mac.update(part)
        return mac.digest()

    def verify(self, proof: bytes, *fields: bytes) -> bool:
        return hmac.compare_digest(proof, self.sign(*fields))


_GREETING = b"rlinf data plane 1\n"
_NONCE = 32
_PROOF = 32
_LENGTH = struct.Struct("<H")
_LARGEST_IDENTITY = 4096


class Admission(IntEnum):
    """The acceptor's answer to an authenticated dialer."""

    WELCOME = 1
    DUPLICATE = 2  # another connection between the two exists, or is being made
    STALE = 3  # the endpoint that the dialer seeks is no longer here


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The identity of one end of a connection.

    Attributes:
        seeks: the incarnation that it expects at the other end.
        connection: the name of the connection, chosen by the dialer.
        replaces: the name of the last connection to the same endpoint that the dialer lost, or empty.
    """

    incarnation: str
    seeks: str
    connection: str
    replaces: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> PeerIdentity:
        fields = load_json_object(data)
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})


class _Line:
    """A socket whose reads share one deadline."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the handshake took too long")
            self._sock.settimeout(left)
            piece = self._sock.recv(size - len(data))
            if not piece:
                raise ConnectionResetError("the other side hung up during the handshake")
            data += piece
        return bytes(data)

    def read_identity(self) -> bytes:
        (size,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if size > _LARGEST_IDENTITY:
            raise AuthenticationError("the other side's handshake is malformed")
        return self.read(size)

    def write(self, data: bytes) -> None:
        self._sock.settimeout(max(0.001, self._deadline - time.monotonic()))
        self._sock.sendall(data)


def dial(
    sock: socket.socket, secret: ClusterSecret, mine: PeerIdentity, deadline: float
) -> tuple[Admission, PeerIdentity]:
    """Do the dialer's part of the handshake; return the acceptor's verdict and identity.

    Raises:
        AuthenticationError: the listener does not belong to this cluster, or refuses this process.
        OSError: the connection broke, or the deadline passed.
    """
    line = _Line(sock, deadline)
    nonce = secrets.token_bytes(_NONCE)
    line.write(_GREETING + nonce)
    if line.read(len(_GREETING)) != _GREETING:
        raise AuthenticationError("the listener does not speak this version of the data plane")
    theirs = line.read(_NONCE)
    identity = mine.encode()
    line.write(secret.sign(b"dial", nonce, theirs, identity) + _LENGTH.pack(len(identity)) + identity)
    try:
        verdict = line.read(1)
    except ConnectionResetError:
        raise AuthenticationError(
            "the other side hung up on our proof of membership",
            help="both processes must hold the secret of the same cluster",
        ) from None
    proof = line.read(_PROOF)
    answer = line.read_identity()
    if not secret.verify(proof, b"accept", nonce, theirs, identity, verdict, answer):
        raise AuthenticationError("the listener does not belong to this cluster")
    return Admission(verdict[0]), PeerIdentity.decode(answer)


class Acceptance:
    """The acceptor's part of the handshake: reads the dialer's proof, and answers with a verdict."""

    def __init__(self, sock: socket.socket, secret: ClusterSecret, deadline: float) -> None:
        """Read the dialer's proof.

        Raises:
            AuthenticationError: the dialer does not belong to this cluster.
            OSError: the connection broke, or the deadline passed.
        """
        self._line = _Line(sock, deadline)
        self._secret = secret
        if self._line.read(len(_GREETING)) != _GREETING:
            raise AuthenticationError("an unknown peer connected that does not speak this protocol")
        self._theirs = self._line.read(_NONCE)
        self._nonce = secrets.token_bytes(_NONCE)
        self._line.write(_GREETING + self._nonce)
        proof = self._line.read(_PROOF)
        self._identity = self._line.read_identity()
        if not secret.verify(proof, b"dial", self._theirs, self._nonce, self._identity):
            raise AuthenticationError("an unknown peer connected without this cluster's secret")
        try:
            self.dialer = PeerIdentity.decode(self._identity)
        except (ValueError, TypeError, KeyError) as error:
            raise AuthenticationError("the dialer's identity is malformed") from error

    def answer(self, verdict: Admission, mine: PeerIdentity) -> None:
        identity = mine.encode()
        answer = bytes([verdict])
        proof = self._secret.sign(b"accept", self._theirs, self._nonce, self._identity, answer, identity)
        self._line.write(answer + proof + _LENGTH.pack(len(identity)) + identity)


_PREFIX = "rlinf-"
# The kernel's limit is 107 bytes; some systems have less.
LONGEST_PATH = 90


class UnixDirectory:
    """The private directory for the unix sockets of one process.

    The process locks it for its lifetime; later processes remove directories whose lock is free.
    """

    def __init__(self, base: str | None = None) -> None:
        base = base if base is not None and len(base) <= LONGEST_PATH - 40 else tempfile.gettempdir()
        if len(base) > LONGEST_PATH - 40:
            base = "/tmp"
        reap(Path(base))
        self._pid = os.getpid()
        self._lock = -1
        while self._lock < 0:
            self._make(base)

    def _make(self, base: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-", dir=base))  # its mode is 0700
        try:
            lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # another process removed it before it was locked
        fcntl.flock(lock, fcntl.LOCK_EX)
        if self.path.is_dir():
            self._lock = lock
        else:
            os.close(lock)  # another process removed it

    def close(self) -> None:
        """Remove the directory, if this process made it."""
        if self._lock < 0:
            return
        if self._pid == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def reap(base: Path) -> None:
    """Remove the directories that killed processes of this user left in `base`."""
    for directory in base.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid == os.getuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            continue  # its process still runs
        finally:
            os.close(fd)


_log = logging.getLogger(__name__)
_BACKLOG = 128
_OUT_OF_DESCRIPTORS_PAUSE = 0.05
# Admits or refuses an authenticated peer, and owns the socket from then on.
Admit = Callable[[socket.socket, Acceptance], None]


def listen_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(path)
    sock.listen(_BACKLOG)
    return sock


def listen_tcp(host: str, buffer: int, ports: range | None = None) -> socket.socket:
    """Listen on a free port of `host`, or of every address if `host` is not an address of this machine (NAT).

    Args:
        buffer: bytes of the kernel's buffer for each direction.
        ports: the ports to choose from; by default any.

    Raises:
        ClusterError: none of `ports` is free.
    """
    if ports is None:
        return _listen_at(host, 0, buffer)
    # Processes of a node that start together try different ports first.
    first = random.randrange(len(ports))
    for port in (*ports[first:], *ports[:first]):
        try:
            return _listen_at(host, port, buffer)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ClusterError(
        f"no port from {ports[0]} to {ports[-1]} is free on this machine",
        why="every worker, channel and driver listens on one of its node",
        help=f"set a longer range as `cluster.ports`, or as `{env_vars.PORTS.name}` where Ray was started by hand",
    )


def _listen_at(host: str, port: int, buffer: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Accepted connections inherit the buffers; TCP negotiates the window before a connection is accepted.
        tune_tcp(sock, buffer)
        # Otherwise lingering connections of an ended process would block its port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EINVAL):
                raise
            sock.bind(("", port))
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def tune_tcp(sock: socket.socket, buffer: int) -> None:
    """Set large windows and TCP_NODELAY; the connection ends within 15 seconds after the other host vanishes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)


class Listener:
    """A listener that accepts connections on several sockets, and passes on those that authenticate."""

    def __init__(
        self, sockets: list[socket.socket], secret: ClusterSecret, admit: Admit, *, timeout: float, most: int
    ) -> None:
        """`timeout`: seconds for a handshake. `most`: unproven connections at a time, for each socket."""
        self._sockets = sockets
        self._secret = secret
        self._admit = admit
        self._timeout = timeout
        self._unproven: dict[int, Unproven[socket.socket]] = {
            # All workers of a node may dial at once from one address, so one address may take all places.
            listening.fileno(): Unproven(most, from_one=most)
            for listening in sockets
        }
        self._warn = LimitedWarnings(_log.warning)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="rlinf-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for sock in self._sockets:
            sock.close()
        for unproven in self._unproven.values():
            for sock in unproven.remove_all():
                _hang_up(sock)
        self._warn.close()
        os.close(self._stop)

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        for sock in self._sockets:
            sock.close()
        for unproven in self._unproven.values():
            for sock in unproven.waiting():
                sock.close()
        os.close(self._stop)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._stop, select.POLLIN)
        by_fd = {sock.fileno(): sock for sock in self._sockets}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        while not self._stopped:
            for fd, _ in poller.poll():
                if fd in by_fd:
                    self._accept(by_fd[fd])

    def _accept(self, listening: socket.socket) -> None:
        unproven = self._unproven[listening.fileno()]
        try:
            sock, peer = listening.accept()
        except OSError as error:
            self._warn(f"a connection could not be accepted: {error.strerror or error}")
            for waiting in unproven.remove_all():
                _hang_up(waiting)
            time.sleep(_OUT_OF_DESCRIPTORS_PAUSE)
            return
        if sock.family == socket.AF_UNIX and peer_credentials(sock)[1] != os.getuid():
            sock.close()
            return
        for waiting in unproven.admit(sock, origin_of(peer)):
            _hang_up(waiting)
        threading.Thread(target=self._greet, args=(sock, unproven), name="rlinf-handshake", daemon=True).start()

    def _greet(self, sock: socket.socket, unproven: Unproven[socket.socket]) -> None:
        proven = False
        try:
            acceptance = Acceptance(sock, self._secret, time.monotonic() + self._timeout)
            # From here on no newer connection can displace it. If one did just before, it is not answered.
            proven = unproven.remove(sock)
            if proven:
                self._admit(sock, acceptance)
        except AuthenticationError as error:
            self._warn(f"{error.message} (from {_origin(sock)})")
        except OSError as error:
            _log.debug("a connection ended in its handshake: %s", error)
        except Exception:  # noqa: BLE001 - no connection may end the listener
            _log.exception("a connection could not be admitted")
        finally:
            unproven.remove(sock)
            if not proven:
                sock.close()


def _hang_up(sock: socket.socket) -> None:
    """Shut a connection down; its thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _origin(sock: socket.socket) -> str:
    with contextlib.suppress(OSError):
        return "a local process" if sock.family == socket.AF_UNIX else str(sock.getpeername()[0])
    return "somebody"
