"""The transport to nodes: OpenSSH's client with the user's config, agent and known_hosts, or a child process here.

Commands are bounded in time and output, and `run` runs the event loop for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import resource
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.interrupts import command_signals
from rlinf_core.errors import ClusterError
from rlinf_core.node.node_facts import make_private, private_base
from rlinf_core.suggest import clipped

# The output limit per node, so that a thousand nodes cannot fill this machine's memory.
MAX_OUTPUT_BYTES: Final = 1 << 20
_CHUNK: Final = 1 << 16
_GRACE_SECONDS: Final = 2.0


class CommandOutcome(StrEnum):
    """The outcome of running a command on a node."""

    DONE = "done"
    """The command ran on the node; its exit code is its own."""
    UNKNOWN_HOST_KEY = "unknown host key"
    HOST_KEY_CHANGED = "host key changed"
    KEY_REFUSED = "key refused"
    UNRESOLVED = "unknown host name"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    DROPPED = "connection lost"
    """The connection broke before the command had ended."""
    NO_CLIENT = "no ssh client"
    FAILED = "ssh failed"
    """Ssh failed for another reason, given in its output."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command.

    Attributes:
        rc: its exit code; ssh's own if the command did not run; -1 if it was killed at its deadline or not started.
        stdout, stderr: its output, each truncated to 1 MiB.
        help: the remedy for a `kind` other than done, or None.
    """

    rc: int
    stdout: bytes
    stderr: bytes
    kind: CommandOutcome = CommandOutcome.DONE
    help: str | None = None

    def last_lines(self, count: int = 5) -> str:
        """Return the end of its standard error, or else of its standard output."""
        text = (self.stderr.strip() or self.stdout.strip()).decode(errors="replace")
        return clipped("\n".join(text.splitlines()[-count:]))


OnLine = Callable[[bytes], None]


async def run_process(
    argv: Sequence[str],
    stdin: bytes,
    deadline: float,
    on_line: OnLine | None = None,
    env: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run a local program in its own session, bounded in time and in output.

    Raises:
        OSError: the program cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=None if env is None else dict(env),
        # Ctrl-C is handled by rlinf, which ends the whole session.
        start_new_session=True,
    )
    out, err = _Sink(on_line), _Sink()
    io = asyncio.gather(_feed(process.stdin, stdin), out.take(process.stdout), err.take(process.stderr))
    try:
        async with asyncio.timeout(deadline):
            await io
            rc = await process.wait()
    except TimeoutError:
        await _end_process(process)
        return CommandResult(-1, out.bytes, err.bytes, CommandOutcome.TIMEOUT)
    except asyncio.CancelledError:
        await _end_process(process)
        raise
    return CommandResult(rc, out.bytes, err.bytes)


async def _feed(pipe: asyncio.StreamWriter | None, data: bytes) -> None:
    if pipe is None:
        return
    # A program may end, or close its standard input, before reading all of it; its exit code says why.
    with contextlib.suppress(ConnectionError):
        pipe.write(data)
        await pipe.drain()
        # asyncio still writes the rest. Waiting for that is omitted because it cannot be cancelled cleanly.
        pipe.close()


async def _end_process(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), _GRACE_SECONDS)
            return


class _Sink:
    """The output of a stream, up to a limit; lines are passed on as they arrive."""

    def __init__(self, on_line: OnLine | None = None) -> None:
        self.bytes = b""
        self._on_line = on_line
        self._rest = b""

    async def take(self, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and (chunk := await stream.read(_CHUNK)):
            self.bytes += chunk[: MAX_OUTPUT_BYTES - len(self.bytes)]
            if self._on_line is not None:
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                # An endless line is not the agent's, and is truncated at the limit.
                self._rest = self._rest[-MAX_OUTPUT_BYTES:]
                for line in lines:
                    self._on_line(line)


_SSH_FAILED: Final = 255
# These options come after the user's, since ssh keeps the first value of an option. The user's config decides how host
# keys are checked, and in batch mode ssh fails instead of asking.
_OPTIONS: Final = (
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ControlMaster=auto",
    "ControlPersist=30",
    # Options for interactive logins, which conflict with many concurrent runs.
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "PermitLocalCommand=no",
)
_CAUSES: Final[tuple[tuple[re.Pattern[str], CommandOutcome], ...]] = tuple(
    (re.compile(pattern, re.IGNORECASE), kind)
    for pattern, kind in (
        (r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key for .* has changed", CommandOutcome.HOST_KEY_CHANGED),
        (r"Host key verification failed|No .* host key is known", CommandOutcome.UNKNOWN_HOST_KEY),
        (
            r"Permission denied|Too many authentication failures|no mutual signature|incorrect passphrase",
            CommandOutcome.KEY_REFUSED,
        ),
        (r"Could not resolve hostname", CommandOutcome.UNRESOLVED),
        (r"Timeout, server .* not responding|client_loop: send disconnect|Broken pipe", CommandOutcome.DROPPED),
        (
            r"Connection to .* closed by remote host|Connection to .* closed\.$|Connection reset by peer",
            CommandOutcome.DROPPED,
        ),
        (
            r"connect to host .* port .*: Connection timed out|Operation timed out|during banner exchange",
            CommandOutcome.UNREACHABLE,
        ),
        (
            r"No route to host|Network is unreachable|Connection refused|Connection timed out",
            CommandOutcome.UNREACHABLE,
        ),
        (r"kex_exchange_identification|Connection closed by", CommandOutcome.UNREACHABLE),
    )
)


def ssh_arguments(node: NodeTarget) -> list[str]:
    """Return the arguments of `ssh` before the command: options and destination."""
    file_options = [f"{name}={value}" for name, value in node.ssh.options.items()]
    timeout = math.ceil(node.connect_seconds)
    options = [
        "BatchMode=yes",
        *file_options,
        f"ConnectTimeout={timeout}",
        *_OPTIONS,
        # In quotes, with `%` doubled: ssh splits the value at blanks, and replaces tokens in it.
        f'ControlPath="{str(_control_folder()).replace("%", "%%")}/%C"',
    ]
    arguments = ["-T", *(part for option in options for part in ("-o", option))]
    login = [os.path.expanduser(word) for word in _login(node)]
    return [*arguments, *login, "--", node.host or "localhost"]


def classify(result: CommandResult) -> CommandOutcome:
    """Classify a run of ssh by its exit code and messages."""
    if result.kind is not CommandOutcome.DONE or result.rc != _SSH_FAILED:
        return result.kind
    messages = result.stderr.decode(errors="replace")
    for pattern, kind in _CAUSES:
        if pattern.search(messages):
            # Output of the command shows that the connection had been established.
            return CommandOutcome.DROPPED if kind is CommandOutcome.UNREACHABLE and result.stdout else kind
    return CommandOutcome.DROPPED if result.stdout else CommandOutcome.FAILED


def remedy(kind: CommandOutcome, node: NodeTarget) -> str | None:
    """Return the remedy for an outcome."""
    host = node.host or "localhost"
    options = [part for name, value in node.ssh.options.items() for part in ("-o", f"{name}={value}")]
    login = shlex.join(["ssh", *options, *_login(node), host])
    name = host.rpartition("@")[2]
    name = f"[{name}]:{node.ssh.port}" if node.ssh.port not in (None, 22) else name
    key = node.ssh.identity_file
    if kind is CommandOutcome.KEY_REFUSED and key is not None and not os.path.exists(os.path.expanduser(key)):
        return f"correct `identity_file`: there is no file `{key}` here"
    return {
        CommandOutcome.UNKNOWN_HOST_KEY: f"log in once with `{login}` and compare the key, or add it to known_hosts",
        CommandOutcome.HOST_KEY_CHANGED: "if the machine was reinstalled, remove its old key with"
        f" `ssh-keygen -R {shlex.quote(name)}`; otherwise this may be a man-in-the-middle attack",
        CommandOutcome.KEY_REFUSED: f"make `{login}` work without a password, with `ssh-copy-id`, an agent, or"
        " `identity_file` and `user` in the file",
        CommandOutcome.UNRESOLVED: "correct the host in the file, or give it a `HostName` in ~/.ssh/config",
        CommandOutcome.UNREACHABLE: f"check that the machine is running and that `{login}` connects",
        CommandOutcome.TIMEOUT: f"check that the machine responds: `{login}`",
        CommandOutcome.DROPPED: "check the machine and the network, and run the command again",
        CommandOutcome.FAILED: f"run `{login}` to see the error",
    }.get(kind)


def _login(node: NodeTarget) -> list[str]:
    ssh = node.ssh
    parts: list[str] = []
    if ssh.user and "@" not in (node.host or ""):
        parts += ["-l", ssh.user]
    if ssh.port:
        parts += ["-p", str(ssh.port)]
    if ssh.identity_file:
        parts += ["-i", ssh.identity_file]
    return parts


def ssh_environment() -> dict[str, str]:
    """Return ssh's environment, with messages in English, which are parsed, and an unchanged, forwarded character
    set."""
    env = dict(os.environ)
    overruling = env.pop("LC_ALL", None)
    if overruling:
        env["LANG"] = overruling
    env["LC_MESSAGES"] = "C"
    return env


def _control_folder() -> Path:
    """Return the folder for the sockets of shared connections, which has a short path and is not on a network home.

    A socket's path has at most 107 characters, of which the name takes 41, and 17 more temporarily.
    """
    folder = Path(private_base()) / "ssh"
    for path in (folder.parent, folder):
        try:
            private = make_private(str(path))
        except OSError as error:
            raise ClusterError(
                f"`{path}` cannot be used", why=error.strerror, help="set TMPDIR to a folder of yours"
            ) from None
        if not private:
            raise ClusterError(f"`{path}` is not a private folder of yours", help="remove it, or set TMPDIR")
    return folder


T = TypeVar("T")
# Limited because each run of ssh is a process with three pipes, and a jump host refuses more than its `MaxStartups`.
DEFAULT_PARALLEL: Final = 128
# The wanted limit of descriptors, since each run takes a few and the usual soft limit is 1024.
_DESCRIPTORS: Final = 8192
# The exit codes of a shell that cannot start a program.
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


class Transport:
    """A transport that runs commands on nodes by `ssh`, or as child processes if the node is this machine.

    Runs on the same node share one connection, kept for half a minute.

    Args:
        parallel: the maximum number of nodes contacted at the same time.
    """

    turns: asyncio.Semaphore | None = None

    def __init__(self, *, parallel: int = DEFAULT_PARALLEL) -> None:
        self.turns = asyncio.Semaphore(parallel)

    async def run(
        self,
        node: NodeTarget,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        deadline: float,
        on_line: OnLine | None = None,
    ) -> CommandResult:
        """Run `argv` on `node` and return the result; no failure of a node or its connection raises.

        Args:
            node: the node.
            argv: the command, which is quoted for shells.
            stdin: its standard input; tokens and scripts are passed here, never in `argv`.
            deadline: the seconds after which it is killed.
            on_line: called with each line of its standard output as it arrives.

        Raises:
            ClusterError: there is no private folder for the sockets of ssh.
        """
        if node.host is not None:
            command = ["ssh", *ssh_arguments(node), shlex.join(argv)]
            try:
                result = await run_process(command, stdin, deadline, on_line, ssh_environment())
            except OSError as error:
                hint = "install OpenSSH's client, and have `ssh` on PATH"
                return CommandResult(-1, b"", str(error.strerror).encode(), CommandOutcome.NO_CLIENT, hint)
            kind = classify(result)
            return CommandResult(result.rc, result.stdout, result.stderr, kind, remedy(kind, node))
        try:
            return await run_process(argv, stdin, deadline, on_line)
        except OSError as error:
            rc = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
            return CommandResult(rc, b"", f"{argv[0]}: {error.strerror}".encode())


async def _ended_by_signals(work: Coroutine[Any, Any, T]) -> T:
    with command_signals.cancelling_task():
        return await work


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result. A terminating signal cancels it, which ends the processes that it started."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    watches = sys.version_info < (3, 12) and hasattr(os, "pidfd_open")
    if watches:
        # Python 3.11 would use a thread per process.
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())  # pyright: ignore[reportDeprecated] - not from 3.12 on
    try:
        with warnings.catch_warnings():
            # On Ctrl-C, asyncio warns about awaited processes, which are ended anyway.
            warnings.filterwarnings("ignore", message="A loop is being detached", category=RuntimeWarning)
            return asyncio.run(_ended_by_signals(work))
    except asyncio.CancelledError:
        # A terminating signal cancelled the work, and must now end the command.
        command_signals.check()
        raise
    finally:
        if watches:
            # The watcher serves only this loop, and would keep loops in other threads from starting processes.
            asyncio.set_child_watcher(None)  # pyright: ignore[reportDeprecated, reportArgumentType]
