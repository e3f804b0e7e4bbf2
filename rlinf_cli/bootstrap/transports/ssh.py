"""Nodes reached by the system's OpenSSH client, with the user's own config, agent and known_hosts."""

from __future__ import annotations

import asyncio
import math
import os
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rlinf_cli.bootstrap.inventory import NodeTarget
from rlinf_cli.bootstrap.transports.transport import CommandOutcome, OnLine, Result, Transport, run_process
from rlinf_core.errors import ClusterError

# Each is a process with three pipes here; a gate that all go through refuses more than it is told to take.
DEFAULT_PARALLEL: Final = 128
_SSH_FAILED: Final = 255
# After the user's own: ssh keeps the first value that it is given. Host keys are checked as the user's config says;
# what it would ask about is refused, because nobody is asked in batch mode.
_OPTIONS: Final = (
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ControlMaster=auto",
    "ControlPersist=30",
    # What the user's config has for logging in by hand would break, or be broken by, many runs at once.
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


class SshTransport(Transport):
    """Runs commands by `ssh`. Runs on the same node share one connection for as long as half a minute lies between.

    Args:
        parallel: how many runs there are to be at most at a time; see `turns`.
        program: the client; found on PATH.
    """

    def __init__(self, *, parallel: int = DEFAULT_PARALLEL, program: str = "ssh") -> None:
        self._program = program
        self.turns = asyncio.Semaphore(parallel)
        self._folder = _control_folder()

    async def run(
        self,
        node: NodeTarget,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        deadline: float,
        on_line: OnLine | None = None,
    ) -> Result:
        command = [self._program, *self.arguments(node), shlex.join(argv)]
        try:
            result = await run_process(command, stdin, deadline, on_line, environment())
        except OSError as error:
            hint = "install OpenSSH's client, and have `ssh` on PATH"
            return Result(-1, b"", str(error.strerror).encode(), CommandOutcome.NO_CLIENT, hint)
        kind = classify(result)
        return Result(result.rc, result.stdout, result.stderr, kind, remedy(kind, node))

    def arguments(self, node: NodeTarget) -> list[str]:
        """Return what stands between `ssh` and the command: options and the destination."""
        ssh = node.ssh
        given = [f"{name}={value}" for name, value in ssh.options.items()]
        timeout = math.ceil(node.connect_seconds)
        options = [
            "BatchMode=yes",
            *given,
            f"ConnectTimeout={timeout}",
            *_OPTIONS,
            f"ControlPath={self._folder}/%C",
        ]
        arguments = ["-T", *(part for option in options for part in ("-o", option))]
        if ssh.user:
            arguments += ["-l", ssh.user]
        if ssh.port:
            arguments += ["-p", str(ssh.port)]
        if ssh.identity_file:
            arguments += ["-i", os.path.expanduser(ssh.identity_file)]
        return [*arguments, "--", node.host or "localhost"]


def classify(result: Result) -> CommandOutcome:
    """Return how a run of ssh ended, judged by its exit code and its own words."""
    if result.kind is not CommandOutcome.DONE or result.rc != _SSH_FAILED:
        return result.kind
    said = result.stderr.decode(errors="replace")
    for pattern, kind in _CAUSES:
        if pattern.search(said):
            # Once the command has spoken, the connection had been made.
            return CommandOutcome.DROPPED if kind is CommandOutcome.UNREACHABLE and result.stdout else kind
    return CommandOutcome.DROPPED if result.stdout else CommandOutcome.FAILED


def remedy(kind: CommandOutcome, node: NodeTarget) -> str | None:
    """Return what the user can do about a run that ended so."""
    host = node.host or "localhost"
    login = shlex.join(["ssh", *_login(node), host])
    return {
        CommandOutcome.UNKNOWN_HOST_KEY: f"log in once by `{login}` and compare the key, or add it to known_hosts",
        CommandOutcome.HOST_KEY_CHANGED: "if the machine was installed anew, remove its old key by"
        f" `ssh-keygen -R {shlex.quote(host.rpartition('@')[2])}`; otherwise somebody stands in between",
        CommandOutcome.KEY_REFUSED: f"let `{login}` work without a password: `ssh-copy-id`, an agent, or"
        " `ssh.identity_file` and `ssh.user` in the file",
        CommandOutcome.UNRESOLVED: "correct the host in the file, or give it a `HostName` in ~/.ssh/config",
        CommandOutcome.UNREACHABLE: f"check that the machine is on and that `{login}` connects",
        CommandOutcome.TIMEOUT: f"check that the machine is not stuck: `{login}`",
        CommandOutcome.DROPPED: "check the machine and the network between, and run the command again",
        CommandOutcome.FAILED: f"see what `{login}` says",
    }.get(kind)


def _login(node: NodeTarget) -> list[str]:
    ssh = node.ssh
    parts: list[str] = []
    if ssh.user:
        parts += ["-l", ssh.user]
    if ssh.port:
        parts += ["-p", str(ssh.port)]
    if ssh.identity_file:
        parts += ["-i", ssh.identity_file]
    return parts


def environment() -> dict[str, str]:
    """Of ssh: it speaks English, because its words are read; the character set stays, because it travels to nodes."""
    env = dict(os.environ)
    overruling = env.pop("LC_ALL", None)
    if overruling:
        env["LANG"] = overruling
    env["LC_MESSAGES"] = "C"
    return env


def _control_folder() -> Path:
    """Return where shared connections have their sockets: not on a home that may be a network's, and short."""
    for base in (tempfile.gettempdir(), "/tmp"):
        # A socket's path holds 107 characters: the name has 41, and ssh adds 17 while it makes it.
        if len(base) <= 30:
            break
    folder = Path(base) / f"rlinf-{os.getuid()}" / "ssh"
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    for each in (folder.parent, folder):
        info = each.stat()
        if info.st_uid != os.getuid() or info.st_mode & 0o077:
            raise ClusterError(f"`{each}` is not a private folder of yours", help="remove it, or set TMPDIR")
    return folder
