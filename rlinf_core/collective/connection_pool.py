"""The connection pool: one connection for each pair of endpoints, dialed by the side that needs it first.

A pair uses one connection at a time, so that messages of a new connection come after those of all earlier ones.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from rlinf_core.collective import handshake
from rlinf_core.collective.connection import Connection
from rlinf_core.collective.endpoint_info import EndpointInfo, Settings
from rlinf_core.collective.handshake import Acceptance, Admission, ClusterSecret, PeerIdentity, tune_tcp
from rlinf_core.errors import AuthenticationError, RuntimeFailure
from rlinf_core.process.proc import peer_credentials

_RETRY_AFTER = 0.2
_DIAL_TIMEOUT = 5.0
_UNIX_BUFFER = 1 << 20


class UnreachableError(RuntimeFailure):
    """A failure to connect to an endpoint.

    Attributes:
        gone: whether nothing listens there any more, which means that its process has ended.
    """

    def __init__(self, message: str, *, gone: bool, why: str | None = None) -> None:
        super().__init__(message, why=why)
        self.gone = gone


class ConnectionPool:
    """The connections of one endpoint, by the incarnation of the other end."""

    def __init__(
        self,
        info: EndpointInfo,
        secret: ClusterSecret,
        settings: Settings,
        moved: Callable[[], None],
        opened: Callable[[Connection], None],
    ) -> None:
        """Make an empty pool. `opened` is called for every new connection; for `moved`, see `Connection`."""
        self._info = info
        self._secret = secret
        self._settings = settings
        self._moved = moved
        self._opened = opened
        self._changed = threading.Condition()
        self._established: dict[str, list[Connection]] = {}
        # By endpoint that this one is dialing: whether the socket is connected yet.
        self._dialing: dict[str, bool] = {}
        # Endpoints whose dial was welcomed and whose connection is not established yet.
        self._welcomed: set[str] = set()
        self._last_lost: dict[str, str] = {}
        self._ended = False

    def all(self) -> list[Connection]:
        with self._changed:
            return [connection for group in self._established.values() for connection in group]

    def inherited(self) -> list[Connection]:
        """Return all connections without locking, for a forked child: another thread may have held the lock."""
        return [connection for group in self._established.values() for connection in group]

    def get(self, incarnation: str) -> Connection | None:
        """Return the connection to an endpoint, if there is one."""
        with self._changed:
            return self._get(incarnation)

    def connect(self, info: EndpointInfo, deadline: float) -> Connection:
        """Return the connection to `info`, established if there is none.

        Raises:
            UnreachableError: no connection by the deadline, or the endpoint is gone.
            RuntimeFailure: this endpoint was closed.
            AuthenticationError: the process that answers does not belong to this cluster.
        """
        peer = info.incarnation
        trouble: UnreachableError | None = None
        refused = False
        retry_at = 0.0
        while True:
            with self._changed:
                connection = self._get(peer)
                if connection is not None:
                    return connection
                if self._ended:
                    raise RuntimeFailure("this process's endpoint cannot be used", why="it was closed")
                now = time.monotonic()
                if now >= deadline or (trouble is not None and trouble.gone):
                    raise trouble or UnreachableError(f"no connection to {info} in time", gone=False)
                # Another thread dials, or the peer may: a peer that this host cannot reach may still reach this host.
                if peer in self._dialing or now < retry_at:
                    self._changed.wait(min(deadline - now, _RETRY_AFTER))
                    continue
                self._dialing[peer] = False
            try:
                trouble = self._dial(info, deadline)
            except AuthenticationError:
                # A peer killed during the handshake looks like a stranger; a second attempt tells the two apart.
                if refused:
                    raise
                refused = True
            finally:
                with self._changed:
                    self._dialing.pop(peer, None)
                    self._changed.notify_all()
            retry_at = time.monotonic() + _RETRY_AFTER

    def end_dialing(self) -> None:
        """Fail the waiting calls of `connect`, and dial no more connections."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def admit(self, sock: socket.socket, acceptance: Acceptance) -> None:
        """Answer an authenticated dialer."""
        dialer = acceptance.dialer
        peer = dialer.incarnation
        with self._changed:
            verdict = self._judge(dialer)
            welcome = verdict is Admission.WELCOME
            if welcome:
                self._welcomed.add(peer)
        try:
            acceptance.answer(verdict, self._identity(peer, dialer.connection))
            with self._changed:
                # If the other side welcomed our dial meanwhile, it has given up its own.
                if welcome and self._may_follow(dialer):
                    self._establish(dialer.connection, sock, dialer)
                else:
                    sock.close()
        except OSError:
            sock.close()
            raise
        finally:
            if welcome:
                with self._changed:
                    self._welcomed.discard(peer)
                    self._changed.notify_all()

    def forget(self, connection: Connection) -> bool:
        """Remove a closed connection; return whether it was in the pool."""
        peer = connection.peer.incarnation
        with self._changed:
            group = self._established.get(peer, [])
            if connection not in group:
                return False
            group.remove(connection)
            if not group:
                del self._established[peer]
            self._last_lost[peer] = connection.name
            return True

    def _get(self, incarnation: str) -> Connection | None:
        group = self._established.get(incarnation)
        return next((connection for connection in group if connection.usable), None) if group else None

    def _judge(self, dialer: PeerIdentity) -> Admission:
        if dialer.seeks != self._info.incarnation:
            return Admission.STALE
        if dialer.incarnation in self._welcomed or not self._may_follow(dialer):
            return Admission.DUPLICATE
        # Both sides dial: the lower incarnation wins, but only once its socket is connected; a firewall may block it.
        if self._dialing.get(dialer.incarnation) and self._info.incarnation < dialer.incarnation:
            return Admission.DUPLICATE
        return Admission.WELCOME

    def _may_follow(self, dialer: PeerIdentity) -> bool:
        """Return whether the dialer has no connection here, or only one whose loss it noticed first."""
        existing = self._get(dialer.incarnation)
        return existing is None or dialer.replaces == existing.name

    def _dial(self, info: EndpointInfo, deadline: float) -> UnreachableError | None:
        """Dial once; return None if the caller should look for the connection again at once."""
        try:
            sock = self._reach(info, deadline)
        except OSError as error:
            gone = isinstance(error, ConnectionRefusedError | FileNotFoundError)
            return UnreachableError(f"{info} cannot be reached", gone=gone, why=error.strerror or str(error))
        with self._changed:
            if self._get(info.incarnation) is not None or info.incarnation in self._welcomed:
                # The other side got through meanwhile.
                sock.close()
                return None
            self._dialing[info.incarnation] = True
            replaces = self._last_lost.get(info.incarnation, "")
        name = secrets.token_hex(8)
        timeout = time.monotonic() + self._settings.handshake_timeout
        try:
            verdict, peer = handshake.dial(
                sock, self._secret, self._identity(info.incarnation, name, replaces), min(deadline, timeout)
            )
        except (OSError, AuthenticationError) as error:
            sock.close()
            if isinstance(error, AuthenticationError):
                raise
            return UnreachableError(f"{info} does not answer", gone=False, why=error.strerror or str(error))
        if verdict is Admission.WELCOME:
            self._establish(name, sock, peer)
            return None
        sock.close()
        if verdict is Admission.STALE:
            return UnreachableError(f"{info} is another process by now", gone=True)
        return UnreachableError(f"{info} did not dial back", gone=False)

    def _reach(self, info: EndpointInfo, deadline: float) -> socket.socket:
        if self._info.shares_host_with(info) and info.unix_path is not None:
            try:
                return self._reach_unix(info.unix_path)
            except (PermissionError, FileNotFoundError):
                # Two containers may share a host but no file system: dial over TCP.
                if os.path.isdir(os.path.dirname(info.unix_path)):
                    raise
        family = socket.AF_INET6 if ":" in info.tcp_host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            tune_tcp(sock, self._settings.socket_buffer)
            sock.settimeout(max(0.01, min(_DIAL_TIMEOUT, deadline - time.monotonic())))
            sock.connect((info.tcp_host, info.tcp_port))
        except OSError:
            sock.close()
            raise
        return sock

    def _reach_unix(self, path: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_DIAL_TIMEOUT)
            sock.connect(path)
            if peer_credentials(sock)[1] != os.getuid():
                raise PermissionError("the socket belongs to another user")
        except OSError:
            sock.close()
            raise
        return sock

    def _establish(self, name: str, sock: socket.socket, peer: PeerIdentity) -> None:
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
        connection = Connection(name, sock, peer, self._moved, self._settings.reader_spin, self._settings.spin)
        with self._changed:
            group = self._established.setdefault(peer.incarnation, [])
            connection.former = tuple(group)
            for former in group:
                former.replaced = True
            group.append(connection)
            try:
                self._opened(connection)
            except BaseException:
                # No thread reads it, for example because none could be started.
                self.forget(connection)
                connection.close()
                raise
            self._changed.notify_all()

    def _identity(self, seeks: str, connection: str, replaces: str = "") -> PeerIdentity:
        return PeerIdentity(self._info.incarnation, seeks, connection, replaces)
