"""The exit status and the output of this process, protected from Ray.

By default Ray prints the output of workers and the messages of its own processes to standard output, where they break
lines of the user's program, and loses pending lines at exit. Here, worker output is shown, and the messages go to the
driver's log.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rlinf_core import env_vars
from rlinf_core.cluster.ray_api import gcs_client, ray_api, ray_module
from rlinf_core.errors import ClusterError
from rlinf_core.process.proc import sigterm_deferred

_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM
_KEEP_SECONDS = 0.001
_failed = False
_terminated = False


def end_with_failure() -> None:
    """Make this process exit with status 1, for failures in exit handlers, where raising has no effect."""
    global _failed
    _failed = True


@contextmanager
def own_signals() -> Generator[None, None, None]:
    """Keep this process's handling of SIGTERM while Ray is started or joined within the block.

    Ray would end the process with a crash report and status 15. Without a handler of its own, this process ends as
    after `sys.exit`: groups are shut down, and the status is 143.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set handlers; in other threads Ray does not touch the signal either.
        yield
        return
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
    utils: Any = ray_module("ray._private.utils")
    worker: Any = ray_module("ray._private.worker")
    set_handler, connect = utils.set_sigterm_handler, worker.connect
    try:
        with kept_handler() as set_again:

            def connect_undisturbed(*args: Any, **keywords: Any) -> Any:
                # Ray holds the GIL for up to seconds after setting its handler, so no thread can restore ours.
                with sigterm_deferred():
                    try:
                        return connect(*args, **keywords)
                    finally:
                        set_again()

            utils.set_sigterm_handler, worker.connect = _leave_handler, connect_undisturbed
            yield
    finally:
        utils.set_sigterm_handler, worker.connect = set_handler, connect


@contextmanager
def kept_handler() -> Generator[Callable[[], None], None, None]:
    """Keep the SIGTERM handler within the block; yield a function that restores it.

    Ray's C++ code sets its own handler while it connects, and the default one when it disconnects, which is a bug of
    Ray. Until Python's is restored, a SIGTERM would kill the process, so a thread restores it every millisecond.
    """
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    # Larger than any platform's `struct sigaction`, whose fields are not used.
    kept = ctypes.create_string_buffer(1024)
    sigaction(signal.SIGTERM, None, kept)
    ended = threading.Event()

    def set_again() -> None:
        sigaction(signal.SIGTERM, kept, None)

    def keep() -> None:
        while not ended.wait(_KEEP_SECONDS):
            set_again()

    keeper = threading.Thread(target=keep, name="rlinf-signals", daemon=True)
    with sigterm_deferred():
        keeper.start()
    try:
        yield set_again
    finally:
        ended.set()
        keeper.join()
        set_again()


def _leave_handler(handler: object) -> None:
    """Replace Ray's function that sets a SIGTERM handler in Python, and do nothing."""


def _end(number: int, frame: FrameType | None) -> None:
    global _terminated
    # Recorded, since a SystemExit raised within a call of Ray leaves that call as `SystemExit(1)`.
    _terminated = True
    # A second signal must not interrupt running exit handlers.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(_TERMINATED)


def _restore_exit_code() -> None:
    """Correct the exit status, as the last action of this process."""
    status = _TERMINATED if _terminated else _INTERRUPTED if _is_interrupted() else int(_failed)
    if status:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue  # its reader is gone
        os._exit(status)


def _is_interrupted() -> bool:
    """Return whether Ctrl-C ended the program. Python forgets that if an exit handler uses `exec`, as Ray's do."""
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    return not interactive and isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)


# Handlers run in the reverse order of their registration, so those of user code run before this one.
atexit.register(_restore_exit_code)


LOGGER = logging.getLogger("rlinf")

# Sources of Ray's own lines; worker lines have a process number instead.
_RAYS_OWN: Final = frozenset({"raylet", "gcs_server", "autoscaler", "runtime_env"})
# rlinf reports deaths itself, with worker name and cause; and it starts more processes than cores on purpose.
_KNOWN: Final = ("A worker died or was killed", "worker processes have been started on node")
# Ray does not show the lines of worker logs that begin with these marks.
_MARKS: Final = (b":job_id:", b":actor_name:", b":task_name:")
# In lines of Ray's own processes, only the text after this mark counts.
_INFORMATION: Final = ":info_message:"
# The text from here on is left out: it is in the evidence of the death, which rlinf names.
_LOG_TAIL: Final = " Last 20 lines of the Raylet logs:"
# Ray polls for new files every half second and for new lines every tenth, more often if there are any.
_LATEST_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.02

# The number of shown lines, by pid and whether the stream is standard error.
_shown: Counter[tuple[int, bool]] = Counter()


def keep_plain() -> None:
    """Stop Ray from coloring worker names and merging repeated lines if output is not a terminal.

    Call it before importing Ray, which reads these variables then; the user's settings are kept.
    """
    streams = (sys.stdout, sys.stderr)
    if not all(stream.isatty() for stream in streams) or os.environ.get("NO_COLOR"):
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")


@cache  # once per process: a second Ray uses the same function
def take_over() -> None:
    """Redirect Ray's own lines to the log: known ones as information, other ones as warnings, log files as debug."""
    worker: Any = ray_module("ray._private.worker")
    show = worker.print_to_stdstream

    # The names of the parameters are Ray's.
    def show_or_log(data: dict[str, Any], ignore_prefix: bool) -> None:
        source, lines = data.get("pid"), data.get("lines", ())
        if source in _RAYS_OWN:
            # Only lines from a log file have the field `job`.
            _log(str(source), lines, from_file="job" in data)
            return
        show(data, ignore_prefix)
        if isinstance(source, int):
            _shown[source, bool(data.get("is_err"))] += len(lines)

    worker.print_to_stdstream = show_or_log


def _log(source: str, lines: list[str], *, from_file: bool) -> None:
    for line in lines:
        text = (line.partition(_INFORMATION)[2] or line).partition(_LOG_TAIL)[0]
        if from_file:
            level = logging.DEBUG
        else:
            level = logging.INFO if any(phrase in text for phrase in _KNOWN) else logging.WARNING
        LOGGER.log(level, "Ray's %s: %s", source, text)


def show_the_rest(folder: Path) -> None:
    """Wait up to a second until the output of an embedded Ray's workers has been shown."""
    until = time.monotonic() + _LATEST_SECONDS
    for file in (folder / "session_latest" / "logs").glob("worker-*-*-*.*"):
        try:
            # `worker-WORKER-JOB-PROCESS.out`, or `.err`
            source = int(file.stem.rpartition("-")[2]), file.suffix == ".err"
            printed = 0
            if time.time() - file.stat().st_mtime < 2 * _LATEST_SECONDS:
                with file.open("rb") as content:
                    printed = sum(not line.startswith(_MARKS) for line in content)
        except (OSError, ValueError):
            continue
        while _shown[source] < printed and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)


# A check that a driver can join the Ray at an address. Ray itself would try for minutes, and kill the process if this
# machine is not a node.


_ANSWER_SECONDS: Final = 5.0
_LIST_SECONDS: Final = 5
_ALIVE: Final = 0
# A head speaks gRPC, so every connection begins with an HTTP/2 SETTINGS frame in both directions, here an empty one.
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEADER_BYTES: Final = 9
_FRAME_TYPE, _SETTINGS = 3, 4
_JOIN_SECONDS: Final = 5.0
_PAUSE: Final = 0.2


def check(address: str) -> str:
    """Check that a head answers at `address`, and return the address of this machine's node in its cluster.

    Raises:
        ClusterError: it is not `HOST:PORT`, no head answers there, or this machine is not a node.
    """
    host, _, port = str(address).rpartition(":")
    # The resolver would take a port above 65535 modulo 65536.
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16:
        raise ClusterError(
            f"`{address}` is not the address of a cluster",
            help="give HOST:PORT as printed by `ray start --head`, such as `10.0.0.1:6379`",
        )
    _check_head(address, host.strip("[]"), int(port))
    own, others = _until_here(address)
    if own is None:
        raise ClusterError(
            f"this machine is not a node of the cluster at {address}",
            why="a driver must run on one of its nodes",
            help=f"run the command on one of its nodes: {', '.join(others)}"
            if others
            else "start Ray here: no node is alive",
        )
    return own


def _check_head(address: str, host: str, port: int) -> None:
    seconds = env_vars.CONNECT_TIMEOUT.get()
    try:
        with socket.create_connection((host, port), timeout=min(_ANSWER_SECONDS, seconds)) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            answer = _first_bytes(connection, time.monotonic() + seconds)
    except (OSError, OverflowError) as error:
        raise _silent(address, getattr(error, "strerror", None) or str(error)) from None
    if len(answer) < _FRAME_HEADER_BYTES or answer[_FRAME_TYPE] != _SETTINGS:
        what = "does not speak gRPC" if answer else f"sent nothing within {seconds:g} s, or closed the connection"
        raise _silent(address, f"the listener there is not a Ray head: it {what}")


def _first_bytes(connection: socket.socket, deadline: float) -> bytes:
    """Return the first bytes of the other side, which identify it; fewer if it sends no more by the deadline."""
    answer = b""
    try:
        connection.sendall(_PREFACE)
        while len(answer) < _FRAME_HEADER_BYTES:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = connection.recv(_FRAME_HEADER_BYTES - len(answer))
            if not chunk:
                break
            answer += chunk
    except (TimeoutError, ConnectionError):
        pass
    return answer


def _until_here(address: str) -> tuple[str | None, list[str]]:
    """Return the address of this machine's living node, waiting briefly for it to join, and those of all living nodes.

    Raises:
        ClusterError: the head does not answer.
    """
    ray = ray_api()
    begun = time.monotonic()
    try:
        client = gcs_client(address)
        while True:
            listed = client.get_all_node_info(timeout=_LIST_SECONDS).values()
            alive = [node for node in listed if node.state == _ALIVE]
            own = next((node for node in alive if os.path.exists(node.raylet_socket_name)), None)
            # A head starts before its own node. If other nodes are alive, this one should have joined already.
            patience = _JOIN_SECONDS if alive else env_vars.CONNECT_TIMEOUT.get()
            if own is not None or time.monotonic() - begun > patience:
                address_of_own = None if own is None else str(own.node_manager_address)
                return address_of_own, sorted(node.node_manager_address for node in alive)
            time.sleep(_PAUSE)
    except ray.exceptions.RayError as error:
        if "InvalidAuthToken" in str(error):
            raise _unauthenticated(address) from None
        raise _silent(address, str(error).splitlines()[0] if str(error) else type(error).__name__) from None


def _unauthenticated(address: str) -> ClusterError:
    has_one = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    return ClusterError(
        f"the cluster at {address} rejects this process",
        why="its token differs from the one here" if has_one else "it requires a token, and none is known here",
        help="`rlinf up` keeps a cluster's token in `~/.local/state/rlinf/clusters/NAME.token` of the machine where it"
        " ran: copy that file (mode 0600) and set `RAY_AUTH_TOKEN_PATH` to it",
    )


def _silent(address: str, why: str) -> ClusterError:
    return ClusterError(
        f"the cluster at {address} does not answer",
        why=why,
        help="check that its head is up, that its port is open to this machine, and that the token is here"
        " (`RAY_AUTH_TOKEN_PATH`)",
    )
