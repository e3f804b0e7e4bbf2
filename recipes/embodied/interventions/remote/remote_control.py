"""The operator's side of remote control: keys of a terminal, sent to the source `remote` of an env worker."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Final

from recipes.embodied.interventions.devices.key_bindings import LEGEND, controls_of
from recipes.embodied.interventions.devices.keyboard import Terminal
from recipes.embodied.interventions.intervention import InterventionError
from recipes.embodied.interventions.person import Controls
from recipes.embodied.interventions.remote.remote_messages import MAX_LINE, encode, to_message
from recipes.embodied.interventions.remote.remote_source import read_token
from rlinf_core.foreign.strict_json import load_json_object
from rlinf_core.foreign.terminal_text import escaped

_SECONDS: Final = 10.0  # within which the other side must answer
_LEAST_HZ, _MOST_HZ = 5.0, 100.0
_MOST_SHOWN = 200  # characters of what the other side says


def connect(host: str, port: int, token: str) -> tuple[socket.socket, float]:
    """Return a connection to a source, and its steps in a second.

    Raises:
        InterventionError: nothing answers there, or the token is wrong.
    """
    where = f"{host}:{port}"
    try:
        connection = socket.create_connection((host, port), timeout=_SECONDS)
        # Every device state is a small message that must not wait for others.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(encode({"token": token}))
        line = connection.makefile("rb").readline(MAX_LINE)
        answer = load_json_object(line) if line else {}
        hz = float(answer.get("hz", _LEAST_HZ))
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise InterventionError(
            "the run does not respond",
            where=where,
            why=str(error) or type(error).__name__,
            help="start the run with `intervention: {source: remote, ...}`, and check the address and the tunnel",
        ) from error
    if answer.get("ok") is not True:
        connection.close()
        raise InterventionError(
            "the run rejects this connection",
            where=where,
            why=escaped(str(answer.get("message") or "it closed the connection"))[:_MOST_SHOWN],
            help="use the same token file on both sides",
        )
    return connection, min(max(hz, _LEAST_HZ), _MOST_HZ)


def steer_remotely(host: str, port: int, token_file: str, emit: Callable[[str], None]) -> None:
    """Send the keys of this terminal to a run until Ctrl-C; the policy acts again afterwards.

    Raises:
        InterventionError: there is no terminal, the run does not answer, or it is gone.
    """
    terminal = Terminal()
    try:
        connection, hz = connect(host, port, read_token(token_file))
        emit(f"steering {host}:{port}: {LEGEND}; Ctrl-C ends")
        with connection:
            try:
                while True:
                    connection.sendall(encode(to_message(controls_of(set(), terminal.read()))))
                    time.sleep(1 / hz)
            except KeyboardInterrupt:
                with contextlib.suppress(OSError):
                    connection.sendall(encode(to_message(Controls())))
            except OSError as error:
                raise InterventionError(
                    "the run has ended", where=f"{host}:{port}", why=str(error), help="check its log"
                ) from error
    finally:
        terminal.close()
