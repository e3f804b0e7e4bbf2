"""Processes of one kind on a node, forked from a server that has imported their modules: they share its memory.

Run as a script in the place of an interpreter, with the path of the server's socket and the modules, it starts the
server where none runs and has it fork the process. Where that fails it becomes the interpreter.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

_MAX_REQUEST = 192 * 1024
# A server imports its modules before it answers.
_ANSWER_SECONDS, _IDLE_SECONDS = 60.0, 10.0


def command(words: Sequence[str], path: str, modules: Sequence[str]) -> list[str]:
    """Return the command that runs what the interpreter `words` would, in a process forked from the server at `path`.

    The modules must start no thread. Those that cannot be imported are left to the processes.
    """
    return [*words, os.path.abspath(__file__), path, ",".join(modules)]


def main() -> None:
    path, modules, *arguments = sys.argv[1:]
    if path == "serve":
        listener, raylet = (int(argument) for argument in arguments)
        serve(socket.socket(fileno=listener), modules.split(","), raylet)
    elif not request_fork(path, modules, arguments):
        os.execv(sys.executable, [sys.executable, *arguments])


def request_fork(path: str, modules: str, arguments: Sequence[str]) -> bool:
    """Have the server at `path` fork a process that runs a script with arguments; return whether it did."""
    request = json.dumps([list(arguments), os.getcwd(), dict(os.environ)]).encode()
    if len(request) > _MAX_REQUEST:
        return False
    with suppress(OSError), _connected(path, modules) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        socket.send_fds(connection, [request], [0, 1, 2])
        return bool(connection.recv(1))
    return False


def _connected(path: str, modules: str) -> socket.socket:
    """Return a connection to the server at `path`, which is started where none listens."""
    folder, name = os.path.split(path)
    opened = os.open(folder, os.O_DIRECTORY)
    try:
        with open(os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The path of a socket is short; that of a folder may be long.
            address = f"/proc/self/fd/{opened}/{name}"
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(address)
            except OSError:
                _start(address, modules)
                connection.connect(address)
            return connection
    finally:
        os.close(opened)


def _start(address: str, modules: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen(1024)
        number = listener.fileno()
        # This process took the place of the one that Ray's node manager started.
        words = [sys.executable, os.path.abspath(__file__), "serve", modules, str(number), str(os.getppid())]
        subprocess.Popen(words, pass_fds=[number], stdin=subprocess.DEVNULL, start_new_session=True)


def serve(listener: socket.socket, modules: Sequence[str], raylet: int) -> None:
    """Fork a process for each request, until the process `raylet` ends or no child has been left for some seconds."""
    # The folder of this script is none to import from; with PYTHONSAFEPATH it is not there.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    alive = os.pidfd_open(raylet)
    # NumPy's library would start threads when it is loaded.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    for name in modules:
        with suppress(Exception):
            import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        return  # a fork would lack the other threads, and keep their locks
    # Children write into no page of the server's objects when they collect garbage.
    gc.collect()
    gc.freeze()
    # Ray takes a child that has ended for alive until it is waited for; the kernel does that at once.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, alive], [], [], _IDLE_SECONDS)
        if alive in ready or not (ready or _has_children()):
            return
        if listener in ready:
            connection, _ = listener.accept()
            with suppress(OSError), connection:
                _fork(connection, [listener.fileno(), alive])


def _fork(connection: socket.socket, own: Sequence[int]) -> None:
    message, streams, _, _ = socket.recv_fds(connection, _MAX_REQUEST, 3)
    try:
        if message and os.fork() == 0:
            _become(connection, json.loads(message), streams, own)
    finally:
        for number in streams:
            os.close(number)


def _become(connection: socket.socket, request: Any, streams: Sequence[int], own: Sequence[int]) -> None:
    """Run the script of a request in this child; never return."""
    status = 1
    try:
        # Fails where nobody waits for it any more.
        connection.send(b"1")
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for number in (*own, connection.detach()):
            os.close(number)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.argv, folder, variables = request
        # Ray kills all that is left of a worker's process group when the worker has ended.
        os.setpgrp()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()  # Python's own generator does so by itself
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - told as the interpreter would
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    main()
