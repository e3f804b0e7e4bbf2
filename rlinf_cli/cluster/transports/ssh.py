"""The command line of the system's OpenSSH client with the user's config, agent and known_hosts."""

from __future__ import annotations

import math
import os
import re
import shlex
from pathlib import Path
from typing import Final

from rlinf_cli.cluster.inventory import NodeTarget
from rlinf_cli.cluster.transports.commands import CommandOutcome, CommandResult
from rlinf_core.errors import ClusterError
from rlinf_core.node.node_facts import make_private, private_base

_SSH_FAILED: Final = 255
# After the user's options: ssh keeps the first value of an option. Host keys are checked by the user's config; batch
# mode refuses what ssh would ask about.
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


def arguments(node: NodeTarget) -> list[str]:
    """Return the arguments of `ssh` before the command: options and destination."""
    ssh = node.ssh
    file_options = [f"{name}={value}" for name, value in ssh.options.items()]
    timeout = math.ceil(node.connect_seconds)
    options = [
        "BatchMode=yes",
        *file_options,
        f"ConnectTimeout={timeout}",
        *_OPTIONS,
        f"ControlPath={_control_folder()}/%C",
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
            # Output of the command means that the connection had been made.
            return CommandOutcome.DROPPED if kind is CommandOutcome.UNREACHABLE and result.stdout else kind
    return CommandOutcome.DROPPED if result.stdout else CommandOutcome.FAILED


def remedy(kind: CommandOutcome, node: NodeTarget) -> str | None:
    """Return the remedy for an outcome."""
    host = node.host or "localhost"
    login = shlex.join(["ssh", *_login(node), host])
    return {
        CommandOutcome.UNKNOWN_HOST_KEY: f"log in once with `{login}` and compare the key, or add it to known_hosts",
        CommandOutcome.HOST_KEY_CHANGED: "if the machine was reinstalled, remove its old key with"
        f" `ssh-keygen -R {shlex.quote(host.rpartition('@')[2])}`; otherwise this may be a man-in-the-middle attack",
        CommandOutcome.KEY_REFUSED: f"make `{login}` work without a password, with `ssh-copy-id`, an agent, or"
        " `ssh.identity_file` and `ssh.user` in the file",
        CommandOutcome.UNRESOLVED: "correct the host in the file, or give it a `HostName` in ~/.ssh/config",
        CommandOutcome.UNREACHABLE: f"check that the machine is running and that `{login}` connects",
        CommandOutcome.TIMEOUT: f"check that the machine responds: `{login}`",
        CommandOutcome.DROPPED: "check the machine and the network, and run the command again",
        CommandOutcome.FAILED: f"run `{login}` to see the error",
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
    """Return ssh's environment: messages in English, as they are parsed; the character set unchanged, as it is
    forwarded."""
    env = dict(os.environ)
    overruling = env.pop("LC_ALL", None)
    if overruling:
        env["LANG"] = overruling
    env["LC_MESSAGES"] = "C"
    return env


def _control_folder() -> Path:
    """Return the folder for the sockets of shared connections: short, and not on a network home.

    A socket's path has at most 107 characters: the name takes 41, and ssh temporarily adds 17.
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
