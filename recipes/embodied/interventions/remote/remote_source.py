"""A person elsewhere, over TCP, with a token: the side of the env worker. Messages: `remote_messages`.

It listens on loopback unless the file says otherwise. A tunnel (`ssh -L 17320:127.0.0.1:17320 robot-pc`) is the safe
way from another machine: the connection itself is not encrypted.
"""

from __future__ import annotations

import hmac
import os
import socket
import stat
from pathlib import Path
from typing import Any

from recipes.embodied.interventions.intervention import InterventionError, Steerable
from recipes.embodied.interventions.person import Controls, PersonSource
from recipes.embodied.interventions.remote.remote_messages import MAX_LINE, BadMessageError, controls_of, decode, encode
from recipes.embodied.interventions.source_options import RemoteOptions

_MOST = 16 * MAX_LINE  # bytes that are read in one step


def read_token(file: str) -> str:
    """Return the token in a file.

    Raises:
        InterventionError: it cannot be read, is empty, or others than its owner may read it.
    """
    how = "make one by `(umask 077; openssl rand -hex 32 > FILE)`, with the same content on both sides"
    try:
        mode = os.stat(file).st_mode
        token = Path(file).read_text("utf-8").strip().partition("\n")[0]
    except (OSError, UnicodeDecodeError) as error:
        raise InterventionError("the token cannot be read", where=file, why=str(error), help=how) from error
    if stat.S_IMODE(mode) & 0o077:
        raise InterventionError("others than its owner may read the token", where=file, help=f"run `chmod 600 {file}`")
    if len(token) < 16:
        raise InterventionError("the token is shorter than 16 characters", where=file, help=how)
    return token


class RemoteSource(PersonSource):
    """Controls that another process sends, one person at a time."""

    options_model = RemoteOptions

    def __init__(self, env: Steerable, options: Any) -> None:
        super().__init__(env, options)
        self._token = read_token(options.token_file)
        try:
            self._listener = socket.create_server((options.host, options.port))
        except OSError as error:
            raise InterventionError(
                f"cannot listen on {options.host}:{options.port}",
                where="remote",
                why=error.strerror or str(error),
                help="choose an address of this node, and a port that is free; each env worker of a node needs its own",
            ) from error
        self._listener.setblocking(False)
        self._person: socket.socket | None = None
        self._known = False
        self._received, self._ended = b"", False
        self._silent = 0
        self._last = Controls()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def poll(self) -> Controls:
        """See `PersonSource`. Where the person was in charge and falls silent, the arm is held where it is."""
        self._accept()
        found = self._messages()
        if found is not None:
            self._silent, self._last = 0, found
            return found
        self._silent += 1
        if not self._last.engaged and not any((*self._last.linear, *self._last.angular)):
            return Controls()
        if self._silent >= self.options.lost_steps:
            raise InterventionError(
                f"the person in charge has said nothing for {self._silent} steps",
                where=f"remote {self.options.host}:{self.options.port}",
                help="connect again in time, or let go before leaving",
            )
        if self._silent >= self.options.hold_steps:
            return Controls(engaged=True)
        return Controls(self._last.linear, self._last.angular, engaged=True)

    def close(self) -> None:
        """See `InterventionSource`."""
        self._drop()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # nobody comes
        connection.setblocking(False)
        if self._person is not None and self._known:
            connection.close()  # one person at a time
            return
        self._drop()
        self._person = connection

    def _messages(self) -> Controls | None:
        """Return what has been told since the last look, in one; None: nothing."""
        controls: list[Controls] = []
        for line in self._lines():
            try:
                message = decode(line)
                if self._known:
                    controls.append(controls_of(message))
                elif not hmac.compare_digest(str(message.get("token")).encode(), self._token.encode()):
                    raise BadMessageError("a wrong token")
                else:
                    self._known = True
                    self._answer({"ok": True, "hz": self._hz})
            except BadMessageError as error:
                self._answer({"ok": False, "message": str(error)})
                self._drop()
                break
        if self._ended:
            self._drop()
        if not controls:
            return None
        newest = controls[-1]
        # Buttons count, however soon after them the next message came.
        verdict = next((each.verdict for each in controls if each.verdict is not None), None)
        toggles = sum(each.toggles_gripper for each in controls) % 2 == 1
        return newest._replace(verdict=verdict, toggles_gripper=toggles)

    def _lines(self) -> list[bytes]:
        """Return the lines that have come since the last look; the last ones of a connection that ended, too."""
        ended = False
        while self._person is not None and not ended and len(self._received) <= _MOST:
            try:
                received = self._person.recv(_MOST)
                ended = not received
                self._received += received
            except BlockingIOError:
                break
            except OSError:
                ended = True
        *lines, self._received = self._received.split(b"\n")
        if any(len(line) > MAX_LINE for line in (*lines, self._received)):
            lines, ended = [], True
        if ended:
            self._ended = True
        return lines

    def _answer(self, message: dict[str, Any]) -> None:
        if self._person is not None:
            try:
                self._person.send(encode(message))
            except OSError:
                self._drop()

    def _drop(self) -> None:
        if self._person is not None:
            self._person.close()
        self._person, self._known, self._received, self._ended = None, False, b"", False
