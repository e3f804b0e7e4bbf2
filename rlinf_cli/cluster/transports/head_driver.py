"""The execution of a driver on the head of a cluster, for a machine that is not one of its nodes."""

from __future__ import annotations

import base64
import contextlib
import json
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from rlinf_cli.cluster.inventory import recorded_targets
from rlinf_cli.cluster.node import node_agent
from rlinf_cli.cluster.transports import agent, transport
from rlinf_core import env_vars
from rlinf_core.errors import ClusterError
from rlinf_core.node.cluster_records import ClusterRecord

_SSH_FAILED: Final = 255
# Seconds for a driver to end when asked (see `node_agent.drive`), plus latency.
_END_SECONDS: Final = 45.0


def run_on_head(
    record: ClusterRecord,
    arguments: Sequence[str],
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
) -> int:
    """Run `python ARGUMENTS` in the login's home on the head with its own interpreter, and return its exit code.

    The driver's output is printed here. Ctrl-C interrupts it, and a second Ctrl-C terminates it. It also ends when this
    process or the connection ends. It joins the cluster's Ray with the address and the token from the head.

    Args:
        record: the cluster.
        arguments: the arguments, as in `["-P", "-m", "rlinf_cli", "train", "-"]`.
        stdin: the driver's standard input.
        env: additional environment variables.

    Raises:
        ClusterError: the head cannot be reached, or the connection was lost.
    """
    head = recorded_targets(record)[0]
    variables = {env_vars.CLUSTER.name: record.name, "PYTHONUNBUFFERED": "1", **(env or {})}
    request = {
        # The agent replaces None by its own interpreter.
        "argv": [None, *arguments],
        "cluster": record.id,
        "code": record.synced,
        "env": variables,
        "stdin": base64.b64encode(stdin).decode("ascii"),
    }
    if head.host is None:
        raise ClusterError(f"cluster `{record.name}` is on this machine", help="run the driver here")
    command = ["ssh", *transport.ssh_arguments(head), shlex.join(agent.command(head.interpreter))]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, env=transport.ssh_environment(), start_new_session=True
    )  # in its own session, because the driver handles Ctrl-C
    rc = _wait(process, agent.source("drive") + json.dumps(request).encode() + b"\n")
    if rc == _SSH_FAILED:
        raise ClusterError(
            f"the connection to the head of cluster `{record.name}` was lost",
            where=head.name,
            why="ssh ended with exit code 255; its messages are above",
            help=f"check `rlinf status`, and that `ssh {shlex.quote(head.host)}` connects",
        )
    return rc


def _wait(process: subprocess.Popen[bytes], script: bytes) -> int:
    """Write `script` to the process and wait for it; forward Ctrl-C."""
    pipe = process.stdin
    if pipe is None:
        return process.wait()
    interrupts = 0
    try:
        _say(process, script)
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts > 2:
                    raise
                _say(process, node_agent.INTERRUPT + b"\n")
    finally:
        with contextlib.suppress(OSError):
            pipe.close()
        # At the end of its input, the agent ends the driver and then itself.
        if process.poll() is None:
            try:
                process.wait(_END_SECONDS if interrupts < 3 else 1.0)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.send_signal(signal.SIGTERM)
                process.wait(5.0)


def _say(process: subprocess.Popen[bytes], text: bytes) -> None:
    """Write to the agent; errors are ignored, since the exit code of an agent that is gone says why."""
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.write(text)
            process.stdin.flush()
