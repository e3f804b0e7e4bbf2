"""A terminal at the breakpoint of a worker."""

from __future__ import annotations

import codecs
import os
import select
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rlinf_cli.console import console
from rlinf_core.errors import RunError
from rlinf_core.node.process_identity import Presence, look
from rlinf_core.suggest import did_you_mean, quoted
from rlinf_core.supervision.lives import Hello

_PART: Final = 65536


def attach(name: str, place: str, hello: Hello, command: str) -> None:
    """Connect standard input and output to the debugger of a process, until either end is closed.

    Args:
        name: the process.
        place: the place of its breakpoint.
        hello: its registration.
        command: what attaches to it, for the machine where it can be.

    Raises:
        RunError: it is on another machine, another terminal is attached, or it has continued.
    """
    from rlinf_core.worker.debugging.breakpoints import GOES_ON, is_own_peer, socket_of

    process = hello.process
    if process is None or hello.info.unix_path is None or look(process) is not Presence.ALIVE:
        host = process.host if process is not None else ""
        raise RunError(
            f"`{name}` waits at a breakpoint of another machine, {place}",
            where=hello.node,
            why="a debugger attaches on the machine of its process, and no port is opened for it",
            help=f"run `{command}` on {host or hello.node}, as the same user",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.connect(socket_of(hello.info.unix_path))
        except OSError as error:
            raise RunError(
                f"`{name}` takes no debugger at {place}",
                where=hello.node,
                why=f"another terminal is attached, or it has continued ({error.strerror})",
            ) from None
        if not is_own_peer(connection):
            raise RunError(f"the breakpoint of `{name}` is not this user's", where=hello.node)
        console.message(f"{name} at {place}: `c` continues it, `q` fails its call, Ctrl-D leaves it waiting")
        goes_on = _connected(connection, GOES_ON)
    console.message(f"{name} {'continues' if goes_on else 'still waits, or has ended'}")


def _connected(connection: socket.socket, mark: str) -> bool:
    """Pass bytes on in both directions until the other end closes; return whether its last one was `mark`."""
    standard_in = sys.stdin.fileno()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ended, text = False, ""
    while True:
        ready, _, _ = select.select([connection, *([] if ended else [standard_in])], [], [])
        if connection in ready:
            received = _received(connection)
            if not received:
                _print("\n")
                return text.endswith(mark)
            text = decoder.decode(received)
            _print(text.removesuffix(mark))
        elif standard_in in ready:
            typed = os.read(standard_in, _PART)
            ended = not typed
            # Where the other end is closed, the next look says so.
            with suppress(ConnectionError):
                connection.sendall(typed) if typed else connection.shutdown(socket.SHUT_WR)


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_PART)
    except ConnectionError:
        return b""


def _print(text: str) -> None:
    # What a worker prints could steer a terminal.
    sys.stdout.write("".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text))
    sys.stdout.flush()


def components_of(config_file: Path) -> dict[str, str]:
    """Return the group names of a run by component, from its `config.yaml`; empty if that cannot be read."""
    from rlinf_cli.why.facts import read_config

    suffix = ".group_name"
    values = read_config(config_file, [])
    return {path.removesuffix(suffix): str(value) for path, value in values.items() if path.endswith(suffix)}


def chosen_processes(names: Iterable[str], words: Sequence[str], groups: Mapping[str, str], where: str) -> list[str]:
    """Return the processes that words name, as `EnvGroup:0`, `EnvGroup` or `env:0`; all of them without words.

    Args:
        names: the processes.
        words: what is asked for.
        groups: the groups by component.
        where: the job, for errors.

    Raises:
        RunError: a word names no process.
    """
    known = list(names)
    if not words:
        return known
    chosen: dict[str, None] = {}
    for word in words:
        component, colon, ranks = word.partition(":")
        spellings = {word, f"{groups.get(component, component)}{colon}{ranks}"}
        matching = [name for name in known if any(name == one or name.startswith(f"{one}:") for one in spellings)]
        if not matching:
            help = did_you_mean(word, known) or f"its processes: {quoted(known[:20])}"
            raise RunError(f"the job has no process `{word}`", where=where, help=help)
        chosen.update(dict.fromkeys(matching))
    return list(chosen)
