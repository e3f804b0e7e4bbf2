"""Logs and debugging of workers: breakpoints that a terminal attaches to, and profiles.

Log lines with the worker's address go to the output of the process and to the worker's log file. The file, on the
worker's node, also contains the output of the worker's code, with known secret values masked.

`breakpoint()` waits for `rlinf ps --attach`, which connects a terminal to the debugger. The debugger does not listen on
a network: its socket is a file in the process's private folder, for this user only.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pdb  # noqa: T100 - the debugger itself
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, TextIO, TypeAlias, cast

from rlinf_core import env_vars
from rlinf_core.config.secrets import environment_secrets
from rlinf_core.context import WorkerContext
from rlinf_core.foreign.files import open_log, write_fault
from rlinf_core.node.stacks import install_spy, py_spy
from rlinf_core.process.known_secrets import hidden, hiding_formatter, remember
from rlinf_core.process.proc import peer_credentials
from rlinf_core.supervision.client import ManagerClient, current_client
from rlinf_core.waiting import OperationKind, is_readable
from rlinf_core.worker.calls import check_call


def set_up_logging(context: WorkerContext) -> None:
    """Set up the logging of this worker; to be called once per process."""
    remember((*environment_secrets(), *context.session.secrets))
    formatter = hiding_formatter(f"%(asctime)s %(levelname)s [{context.address}] %(message)s")
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    problem: OSError | None = None
    if context.session.log_folder:
        try:
            file = _open(Path(context.session.log_folder), context)
        except OSError as error:
            problem = error
        else:
            handlers.append(logging.StreamHandler(file))
            place = context.placement
            rank = f"rank {place.rank} of {place.world_size} on node {place.cluster_node_rank} ({context.node_ip})"
            file.write(f"{_moment()} INFO [{context.address}] process {os.getpid()} is {rank}\n")
            sys.stdout = cast("TextIO", Tee(sys.stdout, file))
            sys.stderr = cast("TextIO", Tee(sys.stderr, file))
    for handler in handlers:
        handler.setFormatter(formatter)
    LOGGER.handlers[:] = handlers
    LOGGER.setLevel(env_vars.LOG_LEVEL.get())
    LOGGER.propagate = False
    if problem is not None:
        # A missing log does not fail the run: on another node the driver's folders may be missing or read-only.
        LOGGER.warning("this worker has no log file on its node: %s", problem)


def _open(folder: Path, context: WorkerContext) -> TextIO:
    group = context.address.root_group_name
    name = "_".join(map(str, context.address.ranks))
    # On another node the run's folder may not exist yet.
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A name such as `../x` must not lead out of the folder.
    component = re.sub(r"^\.+|/", "_", context.session.log_names.get(group, group))
    descriptor = open_log(folder.parent, f"{folder.name}/{component}/rank_{name}.log")
    return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace", buffering=1)


def _moment() -> str:
    """Return the current time in the loggers' format."""
    seconds = time.time()
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))},{int(seconds % 1 * 1000):03}"


class Tee:
    """A stream that also writes to a file; an error of the file, such as a full disk, is ignored.

    Known secret values are masked in both, unless split over several writes.
    """

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self._stream = stream
        self._file = file

    def write(self, text: str, /) -> int:
        masked = hidden(text)
        with suppress(OSError, ValueError):
            self._file.write(masked)
        self._stream.write(masked)
        return len(text)

    def writelines(self, lines: Iterable[str], /) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_SOCKET: Final = "breakpoint"
# Seconds between two checks whether the call was cancelled.
_LOOK_EVERY: Final = 0.25
# The most characters of output of one stop that are kept for a terminal that attaches later.
_MOST_KEPT: Final = 8192
_LINE_BYTES: Final = 65536
_PROMPT: Final = "(rlinf) "
# The last text that a process sends to its terminal before it continues.
GOES_ON: Final = "\0"
_lock = threading.RLock()


def socket_of(unix_path: str) -> str:
    """Return the path of the socket at which a process waits, beside its endpoint's socket."""
    return str(Path(unix_path).with_name(_SOCKET))


def is_own_peer(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a unix socket belongs to this user."""
    return peer_credentials(connection)[1] == os.getuid()


class Debugger(pdb.Pdb):
    """Python's debugger, used through a socket. If the terminal detaches, it waits for the next one."""

    def __init__(self, client: ManagerClient) -> None:
        self._client = client
        self._terminal = _Terminal(client)
        super().__init__(stdin=self._terminal, stdout=self._terminal, nosigint=True, readrc=False)  # pyright: ignore[reportArgumentType] - needs readline, write and flush
        self.prompt = _PROMPT
        self.use_rawinput = False

    def interaction(self, frame: FrameType | None, traceback: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - its name depends on the version
        """Take commands at one stop."""
        place = _place(frame) if frame is not None else "an exception"
        # Other threads of the process that come to a breakpoint wait for their turn.
        with _lock:
            self._terminal.open()
            serial = self._client.operations.begin(OperationKind.BREAKPOINT, place)
            self._client.stops_at(place, attached=self._terminal.attached)
            try:
                super().interaction(frame, traceback)
            except BaseException:
                self._terminal.close()
                raise
            finally:
                self._client.operations.end(serial)
                self._client.stops_at(None)
            if self.quitting or (self.stoplineno == -1 and not self.get_all_breaks()):
                self._terminal.write(GOES_ON)
                self._terminal.close()


class _Terminal:
    """The attached terminal, as the debugger's input and output; reading a command waits until one attaches."""

    def __init__(self, client: ManagerClient) -> None:
        path = client.endpoint.info.unix_path
        self._path = socket_of(path or "")
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._kept = ""
        self._received = b""

    @property
    def attached(self) -> bool:
        return self._connection is not None

    def open(self) -> None:
        """Begin a stop: from now on a terminal can attach."""
        self._kept = ""
        if self._connection is None and self._listener is None:
            self._listen()

    def close(self) -> None:
        """Disconnect the terminal, and stop listening."""
        for held in (self._connection, self._listener):
            if held is not None:
                held.close()
        self._connection = self._listener = None
        with suppress(OSError):
            os.unlink(self._path)

    def write(self, text: str) -> int:
        self._kept = (self._kept + text)[-_MOST_KEPT:]
        self._send(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: `write` sends at once."""

    def readline(self) -> str:
        """Return the next command. A terminal that detaches leaves the process waiting for the next one.

        Raises:
            CancelledOperationError: the call was cancelled.
        """
        while b"\n" not in self._received:
            check_call()
            if self._connection is None:
                self._accept()
            elif is_readable(self._connection, _LOOK_EVERY):
                self._receive(self._connection)
        line, _, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace") + "\n"

    def _listen(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(self._path)
        self._listener.listen(1)

    def _accept(self) -> None:
        listener = self._listener
        if listener is None or not is_readable(listener, _LOOK_EVERY):
            return
        connection, _ = listener.accept()
        if not is_own_peer(connection):
            connection.close()
            return
        # Refuse further terminals at once.
        listener.close()
        self._listener, self._connection = None, connection
        self._send(self._kept)

    def _receive(self, connection: socket.socket) -> None:
        try:
            part = connection.recv(_LINE_BYTES)
        except OSError:
            part = b""
        self._received += part
        if not part:
            self._detach()

    def _send(self, text: str) -> None:
        if self._connection is not None:
            try:
                self._connection.sendall(text.encode(errors="backslashreplace"))
            except OSError:
                self._detach()

    def _detach(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection, self._received = None, b""
            self._listen()


def _place(frame: FrameType) -> str:
    """Return the place of a frame, for example `recipes/x.py:12`."""
    file = frame.f_code.co_filename
    return f"{min(file, os.path.relpath(file), key=len)}:{frame.f_lineno}"


_VARIABLE: Final = "PYTHONBREAKPOINT"
# The prefix of the value that Ray sets in its workers: its own debugger, an extra package that listens on the network.
_OF_RAY: Final = "ray."


def enter_breakpoints() -> None:
    """Make `breakpoint()` in this process wait for `rlinf ps --attach`, unless PYTHONBREAKPOINT is set to another."""
    if os.environ.get(_VARIABLE, _OF_RAY).startswith(_OF_RAY):
        os.environ[_VARIABLE] = f"{__name__}.{wait_here.__name__}"


def wait_here(*_: Any, **__: Any) -> None:
    """Stop the caller until a debugger lets it continue.

    Raises:
        bdb.BdbQuit: the user quit the debugger.
        CancelledOperationError: the call was cancelled meanwhile.
    """
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage] - documented, in spite of its name
    client = current_client()
    if client is None or client.endpoint.info.unix_path is None:
        print(f"breakpoint at {_place(frame)} passed: no debugger can attach to this process", file=sys.stderr)
    else:
        Debugger(client).set_trace(frame)


LOGGER = logging.getLogger("rlinf")
# The time limit for a profiler to write its file.
_END_SECONDS: Final = 20.0
# The option of prctl(2) that names a process which Yama lets trace this one, besides its ancestors.
_SET_TRACER: Final = 0x59616D61


def start_profile(kind: str, file: str) -> Profile | None:
    """Begin a profile of this process; None if it is impossible, with a warning unless torch is not imported.

    `stop` writes the file. If that fails, it is logged and does not end the run.
    """
    path = Path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link is replaced, not followed.
        path.unlink(missing_ok=True)
        return _Sampled(path) if kind == "py-spy" else _Operators(path) if "torch" in sys.modules else None
    except (OSError, RuntimeError) as error:
        LOGGER.warning("no profile of this worker: %s", error)
        return None


class _Operators:
    """torch's profile of the operators and kernels that the calling thread starts."""

    def __init__(self, path: Path) -> None:
        from torch import profiler

        self._path = path
        self._profile: Any = profiler.profile()
        self._profile.start()

    def stop(self) -> None:
        try:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            LOGGER.warning("the profile of this worker cannot be written: %s", write_fault(self._path, error))


class _Sampled:
    """py-spy's sampled profile of this process and of those that it started."""

    def __init__(self, path: Path) -> None:
        program = py_spy()
        if program is None:
            raise RuntimeError(f"py-spy is not installed here: `{install_spy()}`")
        self._path = path
        command = [program, "record", "--pid", str(os.getpid()), "--format", "speedscope", "--output", str(path)]
        # Ray's workers may block SIGINT, which must end py-spy; a child process inherits the blocked signals.
        earlier = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [*command, "--subprocesses"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SET_TRACER, self._process.pid, 0, 0, 0)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            _, printed = self._process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            printed = self._process.communicate()[1]
        if not self._path.exists():
            LOGGER.warning("py-spy wrote no profile of this worker: %s", " ".join(printed.split()) or "it said nothing")


Profile: TypeAlias = _Operators | _Sampled
