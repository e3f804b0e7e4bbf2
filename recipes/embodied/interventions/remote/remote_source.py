"""A person elsewhere, over TCP, with a token: the side of the env worker. Messages: `remote_messages`.

It listens on loopback unless the file says otherwise. A tunnel (`ssh -L 17320:127.0.0.1:17320 robot-pc`) is the safe
way from another machine: the connection itself is not encrypted.

Connections that have not presented the token yet wait apart from the person, in a bounded number and for a bounded
time. Nothing that they send reaches the person's controls or raises here. The newest client that presents the token is
the person.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

from recipes.embodied.interventions.intervention import InterventionError, Steerable
from recipes.embodied.interventions.operator_link import OperatorLink, cannot_listen, merged
from recipes.embodied.interventions.person import Controls, PersonSource
from recipes.embodied.interventions.remote.remote_messages import (
    MAX_LINE,
    BadMessageError,
    controls_of,
    decode,
    encode,
    knows,
)
from recipes.embodied.interventions.source_options import RemoteOptions
from rlinf_core.foreign.strangers import LimitedWarnings, Unproven, origin_of
from rlinf_core.process.known_secrets import remember

_MOST = 16 * MAX_LINE  # bytes that are read of a connection in one step
_MOST_UNPROVEN = 16  # connections that have not presented the token
_TOKEN_SECONDS = 10.0  # within which they must
_log = logging.getLogger("rlinf.interventions")


def read_token(file: str) -> str:
    """Return the token in a file.

    Raises:
        InterventionError: it cannot be read, is empty, or is readable by other users.
    """
    how = "create one with `(umask 077; openssl rand -hex 32 > FILE)`, with the same content on both sides"
    try:
        mode = os.stat(file).st_mode
        token = Path(file).read_text("utf-8").strip().partition("\n")[0]
    except (OSError, UnicodeDecodeError) as error:
        raise InterventionError("the token cannot be read", where=file, why=str(error), help=how) from error
    if stat.S_IMODE(mode) & 0o077:
        raise InterventionError("other users may read the token", where=file, help=f"run `chmod 600 {file}`")
    if len(token) < 16:
        raise InterventionError("the token is shorter than 16 characters", where=file, help=how)
    return token


class _Connection:
    """A connection, with the partially received next line."""

    def __init__(self, sock: socket.socket, origin: str) -> None:
        sock.setblocking(False)
        self.socket, self.origin = sock, origin
        self.ended = False
        self._received = b""

    def lines(self, most: int) -> list[bytes]:
        """Return the lines received since the last call, including the last ones of a closed connection.

        A line that is too long ends it. `most`: bytes that are kept.
        """
        while not self.ended and len(self._received) <= most:
            try:
                received = self.socket.recv(most)
            except BlockingIOError:
                break
            except OSError:
                received = b""
            self.ended = not received
            self._received += received
        *lines, self._received = self._received.split(b"\n")
        if any(len(line) > MAX_LINE for line in (*lines, self._received)):
            self.ended = True
            return []
        return lines

    def put_back(self, lines: list[bytes]) -> None:
        """Have lines be the next ones again."""
        self._received = b"".join(line + b"\n" for line in lines) + self._received

    def answer(self, message: dict[str, Any]) -> None:
        try:
            self.socket.send(encode(message))
        except OSError:
            self.ended = True

    def close(self, why: str = "") -> None:
        if why and not self.ended:
            self.answer({"ok": False, "message": why})
        self.socket.close()


class RemoteSource(PersonSource):
    """Controls sent by another process, one operator at a time."""

    options_model = RemoteOptions

    def __init__(self, env: Steerable, options: Any) -> None:
        super().__init__(env, options)
        self._token = read_token(options.token_file)
        remember([self._token])
        try:
            self._listener = socket.create_server((options.host, options.port))
        except OSError as error:
            raise cannot_listen("remote", options, error) from error
        self._listener.setblocking(False)
        self._unproven: Unproven[_Connection] = Unproven(_MOST_UNPROVEN, seconds=_TOKEN_SECONDS)
        self._warn = LimitedWarnings(_log.warning)
        self._person: _Connection | None = None
        self._link = OperatorLink(options, f"remote {options.host}:{options.port}")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def poll(self) -> Controls:
        """See `PersonSource`. Where the person was in charge and falls silent, the arm is held where it is."""
        self._accept()
        heard = self._messages()
        return self._link.step(heard, connected=self._person is not None)

    def close(self) -> None:
        """See `InterventionSource`."""
        for connection in self._unproven.remove_all():
            connection.close()
        if self._person is not None:
            self._person.close()
            self._person = None
        self._warn.close()
        self._listener.close()

    def _accept(self) -> None:
        """Accept new connections; the newest with a valid token becomes the operator."""
        now = time.monotonic()
        for _ in range(_MOST_UNPROVEN):
            try:
                sock, peer = self._listener.accept()
            except OSError:
                break  # no further connections
            connection = _Connection(sock, origin_of(peer))
            for leaving in self._unproven.admit(connection, connection.origin, now):
                leaving.close()
            # Immediately: later connections must not crowd out one that has sent its token.
            self._hear(connection)
        for connection in self._unproven.waiting():
            self._hear(connection)
        for connection in self._unproven.remove_overdue(now):
            self._warn(f"a connection from {connection.origin} sent no token within {_TOKEN_SECONDS:g} s")
            connection.close("no token came")

    def _hear(self, connection: _Connection) -> None:
        """Check an unauthenticated connection for the token."""
        lines = connection.lines(2 * MAX_LINE)
        if lines:
            try:
                proven = knows(decode(lines[0]), self._token)
                fault = "a wrong token"
            except BadMessageError as error:
                proven, fault = False, str(error)
            self._unproven.remove(connection)
            if proven:
                connection.put_back(lines[1:])
                self._take(connection)
            else:
                self._warn(f"a connection from {connection.origin} sent {fault}; closed")
                connection.close(fault)
        elif connection.ended:
            self._unproven.remove(connection)
            connection.close()

    def _take(self, connection: _Connection) -> None:
        """Make a connection the operator's, replacing one whose link may be dead."""
        if self._person is not None:
            self._person.close("another client with the token has taken over")
        self._person = connection
        connection.answer({"ok": True, "hz": self._hz})

    def _messages(self) -> Controls | None:
        """Return the controls received since the last call, merged; None: none."""
        person = self._person
        if person is None:
            return None
        controls: list[Controls] = []
        fault = ""
        for line in person.lines(_MOST):
            try:
                controls.append(controls_of(decode(line)))
            except BadMessageError as error:
                fault = str(error)
                break
        if fault or person.ended:
            person.close(fault)
            self._person = None
        return merged(controls)
