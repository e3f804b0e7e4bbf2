"""Starting Ray on a node, waiting until it is up, and ending it with all its resources.

Sent to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from rlinf_cli.cluster.node import node_probe
from rlinf_cli.cluster.node import node_probe as holdings
from rlinf_core.node import node_facts as facts
from rlinf_core.process import proc as processes

_PAUSE = 0.1
_GRACE_SECONDS = 8.0
_LOG = "up.log"
# The message of `ray start` when its raylet has not registered after 30 s, a fixed limit of Ray.
_OWN_LIMIT = "The current node timed out during startup"
# The message of `ray start` when its raylet has registered. If it is not found, a process that is still alive
# `_OWN_LIMIT_SECONDS` after its ports answer must have registered, too.
_STARTED = "Ray runtime started"
_OWN_LIMIT_SECONDS = 35.0
# What a shell does not take as it is in a word.
_SPECIAL = re.compile(r"[\s\"'\\$`&|;<>()*?\[\]{}#!~]")


class NodeError(Exception):
    """A node cannot do what was requested: message, cause, remedy, exit code and the end of its log."""

    def __init__(self, message: str, *, why: str = "", help: str = "", rc: int | None = None, lines: str = "") -> None:
        super().__init__(message)
        self.answer = {"message": message, "why": why, "help": help, "rc": rc, "lines": lines}


class SlowError(NodeError):
    """Ray ended because it exceeded its own startup limit."""


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Start Ray on this node unless it runs; return its record.

    Raises:
        NodeError: Ray does not start.
    """
    cluster, folder = request["cluster"], facts.folder_of(request["cluster"])
    end = time.monotonic() + request["deadline"]
    _make_private(os.path.dirname(folder))
    with _only_one(f"{folder}.lock"):
        record = facts.read_record(folder)
        if record is not None and processes.alive(record.get("process")) and not request.get("restart"):
            return {**facts.without_env(record), "started": False}
        # Leftovers of a Ray that died or whose head is gone.
        _end_all(cluster, folder)
        _check_ports(request)
        _check_interpreter(request)
        address = _own_address(request, end)
        try:
            _launch_until_ready(request, folder, address, end)
        except BaseException:
            _end_all(cluster, folder)
            holdings.remove(f"{folder}.lock")
            _leave_no_base(folder)
            raise
        record = facts.read_record(folder) or {}
        return {**facts.without_env(record), "started": True}


def _launch_until_ready(request: dict[str, Any], folder: str, address: str, end: float) -> None:
    """Start Ray; retry while there is time, if it hit its own startup limit."""
    while True:
        try:
            _make_private(folder)
            process = _launch(request, folder, address)
        except OSError as error:
            raise no_room(folder, error) from None
        try:
            _wait_ready(request, process, folder, address, end)
            return
        except SlowError:
            if time.monotonic() > end:
                raise
            _end_all(request["cluster"], folder)


def _launch(request: dict[str, Any], folder: str, address: str) -> subprocess.Popen[bytes]:
    env = node_probe.environment(request)
    env.update(facts.ray_environment(request["cluster"], folder, request.get("token")), RAY_USAGE_STATS_ENABLED="0")
    if address.startswith("127."):
        # Without this, Ray replaces a loopback address by the machine's own, and listens on every interface.
        env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    command = _command(request, folder, address)
    log = os.open(os.path.join(folder, _LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    finally:
        os.close(log)
    record = {
        "cluster": request["cluster"],
        "name": request["name"],
        "rank": request["rank"],
        "process": processes.identity(process.pid),
        "address": address,
        "gcs": f"{request['head_address'] or address}:{request['ports']['gcs']}",
        "folder": folder,
        "head_process": request.get("head_process"),
        "spec": request["spec"],
        "env": request.get("env", {}),
        "code": bool(request.get("code")),
        "from": request.get("from"),
        "path": request.get("path", ""),
        "section": request.get("section", ""),
        "since": time.time(),
    }
    facts.write_private(os.path.join(folder, "node.json"), json.dumps(record))
    return process


def _command(request: dict[str, Any], folder: str, address: str) -> list[str]:
    ports = request["ports"]
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", "--log-style=record"]
    if request["head"]:
        command += ["--head", f"--port={ports['gcs']}", "--include-dashboard=false", "--dashboard-host=127.0.0.1"]
        # The monitor has nothing to scale here, and would serve metrics to everybody on a port outside the range.
        command.append("--no-monitor")
        command.append(f"--dashboard-port={ports['dashboard']}")
        # Ray rejects this option without grpc, and with it would otherwise choose a port outside the range.
        if find_spec("grpc") is not None:
            command.append(f"--ray-client-server-port={ports['client_server']}")
    else:
        command += [f"--address={request['head_address']}:{ports['gcs']}"]
    labels = ",".join(f"{name}={value}" for name, value in request["labels"].items())
    return [
        *command,
        f"--node-ip-address={address}",
        f"--node-manager-port={ports['node_manager']}",
        f"--object-manager-port={ports['object_manager']}",
        f"--dashboard-agent-listen-port={ports['agent_listen']}",
        f"--dashboard-agent-grpc-port={ports['agent_grpc']}",
        f"--runtime-env-agent-port={ports['runtime_env_agent']}",
        f"--metrics-export-port={ports['metrics_export']}",
        f"--min-worker-port={ports['first_worker']}",
        f"--max-worker-port={ports['last_worker']}",
        f"--temp-dir={folder}",
        f"--object-store-memory={facts.object_store_bytes()}",
        f"--labels={labels}",
        "--disable-usage-stats",
    ]


def _wait_ready(
    request: dict[str, Any], process: subprocess.Popen[bytes], folder: str, address: str, end: float
) -> None:
    """Wait until Ray's own ports answer and `ray start` no longer gives up by itself.

    Whether the head lists the node is checked on the head.
    """
    ports, log = request["ports"], os.path.join(folder, _LOG)
    answers_since = time.monotonic()
    wanted = [ports["gcs"], ports["node_manager"]] if request["head"] else [ports["node_manager"]]
    while True:
        wanted = [port for port in wanted if holdings.answers(address, port) is not None]
        rc = process.poll()
        if rc is not None:
            raise _ended(rc, holdings.tail(log))
        if wanted:
            answers_since = time.monotonic()
        elif _STARTED in holdings.tail(log, lines=200) or time.monotonic() - answers_since > _OWN_LIMIT_SECONDS:
            return
        if time.monotonic() > end:
            raise NodeError(
                f"Ray did not come up within {request['deadline']:.0f} s",
                why=f"nothing answers on port {wanted[0]} yet" if wanted else "its raylet has not registered yet",
                help="allow more with `--timeout`, or check what keeps the machine busy",
                lines=holdings.tail(log),
            )
        time.sleep(_PAUSE)


def _ended(rc: int, lines: str) -> NodeError:
    last = lines.splitlines()[-1].strip() if lines else ""
    ending = f"exit code {rc}" if rc >= 0 else f"signal {-rc}"
    why = f"`ray start` ended with {ending}" + (f": {last}" if last else "")
    if _OWN_LIMIT in lines:
        help = "check what keeps the machine busy, or allow more attempts with `--timeout`: each takes up to 30 s"
        return SlowError("Ray timed out during startup", why=why, help=help, rc=rc, lines=lines)
    help = "fix the problem in its last lines, and run the command again"
    return NodeError("Ray ended during startup", why=why, help=help, rc=rc, lines=lines)


def _check_ports(request: dict[str, Any]) -> None:
    names = request["fixed"]
    conflicts = node_probe.taken_ports({name: request["ports"][name] for name in names}, set())
    if conflicts:
        name, port, process = conflicts[0]
        raise NodeError(
            f"port {port} is taken",
            why=f"{process} listens on it; Ray needs it as its {name.replace('_', ' ')} port",
            help="set other ports in `cluster.ports` of the file, or end that process",
        )


def _check_interpreter(request: dict[str, Any]) -> None:
    """Check that the head's own server of clients can start: Ray starts it by a shell, without quotes."""
    special = _SPECIAL.search(sys.executable)
    if request["head"] and special is not None:
        shown = "a blank" if special[0].isspace() else f"`{special[0]}`"
        raise NodeError(
            f"Ray's head cannot be started by `{sys.executable}`",
            why=f"Ray gives its path, with {shown} in it, to a shell without quotes",
            help="set `python_interpreter_path` to an environment in another folder, or start rlinf from one",
        )


def _own_address(request: dict[str, Any], end: float) -> str:
    """Return the address at which other nodes reach this node: its own on the route to the head."""
    if request["head"]:
        address = request["address"]
        try:
            address = socket.gethostbyname(address)
            with socket.socket() as probe:
                probe.bind((address, 0))
        except OSError as error:
            raise NodeError(
                f"`{request['address']}` is not an address of this machine",
                why=str(error),
                help="set `cluster.head_address` to one of its addresses",
            ) from None
        return address
    return _reach(request["head_address"], request["ports"]["gcs"], end, wait=bool(request.get("wait")))


def _reach(head: str, port: int, end: float, *, wait: bool) -> str:
    """Connect to the head, and return this machine's own address on that route.

    Args:
        wait: whether the head may still be starting, so that a refused connection is retried.
    """
    while True:
        try:
            # The address of this machine must be one of IPv4, too.
            where = (socket.gethostbyname(head), port)
            with socket.create_connection(where, timeout=max(0.5, min(5.0, end - time.monotonic()))) as line:
                return str(line.getsockname()[0])
        except OSError as error:
            fault: OSError = error
        refused = isinstance(fault, ConnectionRefusedError)
        if time.monotonic() > end or (refused and not wait):
            raise NodeError(
                f"this machine cannot reach the head at {head}:{port}",
                why=str(fault),
                help="open the ports of `cluster.ports` between the machines, or set `cluster.head_address` to an"
                " address they can reach",
            )
        time.sleep(_PAUSE)


def no_room(folder: str, error: OSError) -> NodeError:
    """Return the error for a file that cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return NodeError(
        "the disk is full" if full else "the node's folder cannot be written",
        why=f"{folder}: {error.strerror}",
        help="free some space on it" if full else "check its owner and permissions",
    )


def _make_private(folder: str) -> None:
    try:
        private = facts.make_private(folder)
    except OSError as error:
        raise no_room(folder, error) from None
    if not private:
        raise NodeError(f"`{folder}` is not a private folder of this user", help="remove it")


@contextmanager
def _only_one(path: str) -> Generator[None, None, None]:
    """Hold the lock of this node's cluster."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise no_room(path, error) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file, and another process may hold the next one.
            os.stat(path)
        except OSError:
            raise NodeError(
                "another `rlinf up` or `down` is running on this node",
                why="it may run on another machine, or have lost its connection a moment ago",
                help="wait for it, and run the command again",
            ) from None
        yield
    finally:
        os.close(lock)


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """End the processes of `start` with all descendants; return the leftovers, normally none.

    Raises:
        NodeError: another command is running on this node.
    """
    cluster, folder = request["cluster"], facts.folder_of(request["cluster"])
    lock = f"{folder}.lock"
    if not os.path.isdir(os.path.dirname(folder)):
        return {"found": False, "ended": 0, "processes": [], "ports": [], "files": [], "shared": []}
    with _only_one(lock):
        existed = os.path.isdir(folder) or os.path.isdir(node_probe.code_folder(cluster))
        remaining = _end_all(cluster, folder, float(request.get("grace", _GRACE_SECONDS)))
        if not remaining["processes"]:
            remaining["files"] += [path for path in (node_probe.code_folder(cluster),) if holdings.remove(path)]
        holdings.remove(lock)
        _leave_no_base(folder)
    return {"found": existed or bool(remaining["ended"]), **remaining}


def _leave_no_base(folder: str) -> None:
    """Remove the folder of this user's clusters if it is empty."""
    with suppress(OSError):
        os.rmdir(os.path.dirname(folder))


def _end_all(cluster: str, folder: str, grace: float = _GRACE_SECONDS) -> dict[str, Any]:
    record = facts.read_record(folder)
    process = record.get("process") if record else None
    pids = processes.processes_of(cluster, folder)
    held = holdings.holdings(pids, float(record.get("since") or time.time()) if record else time.time())
    first = [pid for pid in pids if processes.identity(pid) == process]
    if first:
        # Ray's own shutdown: it notifies its head and workers, and takes seconds.
        processes.send(first, signal.SIGTERM)
        end = time.monotonic() + grace
        while processes.processes_of(cluster, folder) and time.monotonic() < end:
            time.sleep(_PAUSE)
    remaining = processes.kill_all(cluster, folder)
    others = holdings.listeners() if held.ports else {}
    shared = [path for path in held.shared if holdings.remove(path)] if not remaining else list(held.shared)
    holdings.reap_sockets()
    files = [path for path in (folder, *held.folders) if not remaining and holdings.remove(path)]
    return {
        "ended": len(pids),
        "processes": [holdings.described(pid) for pid in remaining],
        "ports": [port for port in held.ports if others.get(port) in remaining and port in others],
        "files": files,
        "shared": shared,
    }
