"""A server that forks the processes of a group on one node: they share the memory of its imports.

The process that hosts the group runs it as a script, with a message socket between the two. Each request brings one end
of a connection for the new process. When the host ends, the server kills the processes that it started, and ends.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Final, NoReturn

_MESSAGE_BYTES: Final = 64 * 1024


@dataclass(frozen=True)
class ForkSettings:
    """The settings of a server.

    Attributes:
        entry: the function that a new process calls with its connection, its name and `arguments`, as
            `package.module:function`.
        modules: the modules to import once. If one starts a thread, each process imports them by itself.
        path: the folders to import from.
        logs: the folder for the output of processes, in files named as Ray does; None for the server's own output.
        job: Ray's id of the job, a part of these file names.
        arguments: plain values for `entry`.
    """

    entry: str
    modules: tuple[str, ...]
    path: tuple[str, ...]
    logs: str | None
    job: str
    arguments: tuple[Any, ...] = ()


class ForkClient:
    """The host's side of a server.

    Raises:
        OSError: the server could not be started.
    """

    def __init__(self, settings: ForkSettings) -> None:
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            number = other.fileno()
            words = [sys.executable, os.path.abspath(__file__), str(number), json.dumps(asdict(settings))]
            subprocess.Popen(words, pass_fds=[number], stdin=subprocess.DEVNULL, start_new_session=True)

    def start(self, name: str) -> socket.socket:
        """Fork a process; return the connection to it.

        Raises:
            OSError: the server has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.socket, [json.dumps({"start": name}).encode()], [theirs.fileno()])
        return ours

    def kill(self, name: str) -> None:
        """Kill a process, if it lives. Its end is reported as for any other process."""
        with suppress(OSError):
            self.socket.send(json.dumps({"kill": name}).encode())

    def receive(self) -> dict[str, Any] | None:
        """Return the server's next message: `name` and `pid` of a new process, or `name` and `end` of an ended one.

        `end` is a status of `os.waitpid`, or the reason why the fork failed. None if the server has ended."""
        message = self.socket.recv(_MESSAGE_BYTES)
        return json.loads(message) if message else None


class _Server:
    def __init__(self, host: socket.socket, settings: ForkSettings) -> None:
        self._host, self._settings = host, settings
        self._selector = selectors.DefaultSelector()
        self._selector.register(host, selectors.EVENT_READ)
        # Pids and descriptors by name.
        self._children: dict[str, tuple[int, int]] = {}
        sys.path[:] = settings.path
        self._variables = dict(os.environ)
        # By default, NumPy's BLAS library starts threads when it is loaded.
        os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
        for name in settings.modules:
            with suppress(Exception):
                import_module(name)
        # A forked process would lack the other threads, but have their locks held.
        self._forks = len(os.listdir("/proc/self/task")) == 1
        # Keeps garbage collection in children from writing into pages that they share with the server.
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Start and reap processes until the host ends."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.data)
                elif not self._take_request():
                    for _, descriptor in self._children.values():
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    return

    def _take_request(self) -> bool:
        """Handle a request; return whether the host lives."""
        message, descriptors, _, _ = socket.recv_fds(self._host, _MESSAGE_BYTES, 1)
        if not message:
            return False
        request = json.loads(message)
        if "kill" in request:
            child = self._children.get(request["kill"])
            if child is not None:
                signal.pidfd_send_signal(child[1], signal.SIGKILL)
            return True
        (connection,) = descriptors
        try:
            self._start(request["start"], connection)
        except OSError as error:
            self._tell(name=request["start"], end=str(error))
        finally:
            os.close(connection)
        return True

    def _start(self, name: str, connection: int) -> None:
        pid = os.fork() if self._forks else self._spawn(name, connection)
        if pid == 0:
            self._become(name, connection)
        descriptor = os.pidfd_open(pid)
        self._children[name] = pid, descriptor
        self._selector.register(descriptor, selectors.EVENT_READ, name)
        self._tell(name=name, pid=pid)

    def _spawn(self, name: str, connection: int) -> int:
        """Start a process that imports everything by itself; return its pid."""
        words = [sys.executable, os.path.abspath(__file__), "alone", str(connection), name]
        words.append(json.dumps(asdict(self._settings)))
        process = subprocess.Popen(words, pass_fds=[connection], stdin=subprocess.DEVNULL, env=self._variables)
        process.returncode = 0  # keeps Popen from reaping it: `_reap` does
        return process.pid

    def _become(self, name: str, connection: int) -> NoReturn:
        try:
            self._selector.close()
            self._host.close()
            for _, descriptor in self._children.values():
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(self._variables)
            if "numpy.random" in sys.modules:
                sys.modules["numpy.random"].seed()  # Python's own generator reseeds itself after a fork
        finally:
            run(name, connection, self._settings)

    def _reap(self, name: str) -> None:
        pid, descriptor = self._children.pop(name)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        self._tell(name=name, end=status)

    def _tell(self, **message: Any) -> None:
        with suppress(OSError):
            self._host.send(json.dumps(message).encode())


def run(name: str, connection: int, settings: ForkSettings) -> NoReturn:
    """Run the entry in this process, and end the process."""
    status = 1
    try:
        if settings.logs is not None:
            _write_to(settings.logs, settings.job, name)
        module, _, function = settings.entry.partition(":")
        getattr(import_module(module), function)(connection, name, *settings.arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - printed as the interpreter would
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _write_to(folder: str, job: str, name: str) -> None:
    """Write this process's output into files named like those of Ray's workers, so that Ray shows their lines."""
    stem = os.path.join(folder, f"worker-{os.urandom(28).hex()}-{job}-{os.getpid()}")
    for number, suffix in ((1, "out"), (2, "err")):
        with suppress(OSError), open(f"{stem}.{suffix}", "ab", buffering=0) as file:
            file.write(f":actor_name:{name}\n".encode())
            os.dup2(file.fileno(), number)


def main(arguments: Sequence[str]) -> None:
    """Run as the server, or as one of the processes if the server cannot fork."""
    settings = ForkSettings(**json.loads(arguments[-1]))
    if arguments[0] == "alone":
        sys.path[:] = settings.path
        run(arguments[2], int(arguments[1]), settings)
    _Server(socket.socket(fileno=int(arguments[0])), settings).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
