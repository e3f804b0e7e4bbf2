"""The agent that `rlinf` runs on a node: it reads a request from standard input, and replies in lines of JSON.

It is sent over ssh to the node's interpreter, so this file and those in `PARTS` of `agent.py` use only the standard
library, and no syntax or function later than Python 3.8. A request is never printed, since it may hold the cluster's
token. Instead of answering a request, `drive` runs a driver for a user on another machine until the connection ends.
"""

from __future__ import annotations

import base64
import hmac
import io
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlinf_cli.cluster.node import node_probe, node_ray
from rlinf_cli.cluster.node.node_ray import NodeError
from rlinf_core.foreign.strangers import Unproven, origin_of
from rlinf_core.node import node_facts as facts
from rlinf_core.process import proc as processes

_PAUSE = 0.1


def members(request: dict[str, Any]) -> dict[str, Any]:
    """Return the nodes and jobs that the head lists, after waiting for the nodes `wanted` until `deadline`.

    Raises:
        NodeError: the head cannot be queried.
    """
    folder = facts.folder_of(request["cluster"])
    record = facts.read_record(folder)
    if record is None or not processes.alive(record.get("process")):
        raise NodeError("the head is not up", why="its Ray has ended" if record else "this cluster does not run there")
    env = node_probe.environment(record)
    token = os.path.join(folder, "token")
    env["RAY_AUTH_MODE"] = "token" if os.path.exists(token) else "disabled"
    env["RAY_AUTH_TOKEN_PATH"] = token
    wanted = [str(rank) for rank in request.get("wanted", ())]
    seconds = float(request["deadline"])
    reply = node_probe.ask_interpreter(
        env, "members", record["gcs"], json.dumps(wanted), str(seconds), seconds=seconds + 20
    )
    if "fault" in reply:
        raise NodeError("the head cannot be queried", why=reply["fault"])
    return reply["found"]


def end_jobs(request: dict[str, Any]) -> dict[str, Any]:
    """Ask the drivers on this node to end, and wait for them until the deadline; return the number left.

    The command must match the driver's, since a pid may mean another process, as in a container.
    """
    end = time.monotonic() + float(request["deadline"])
    record = facts.read_record(facts.folder_of(request["cluster"])) or {}
    drivers = {
        job["pid"]: processes.identity(job["pid"])
        for job in request["jobs"]
        if job["address"] == record.get("address") and node_probe.command_of(job["pid"]) == job["command"]
    }
    processes.send(list(drivers), signal.SIGTERM)
    remaining = [driver for driver in drivers.values() if processes.alive(driver)]
    while remaining and time.monotonic() < end:
        time.sleep(_PAUSE)
        remaining = [driver for driver in remaining if processes.alive(driver)]
    return {"told": len(drivers), "left": len(remaining)}


# A command that may follow the request, in lines of its own.
INTERRUPT = b"INT"
# Signals to a driver, and seconds to the next one: a second SIGINT ends it at once.
_GRACE = ((signal.SIGINT, 15.0), (signal.SIGINT, 10.0), (signal.SIGKILL, 5.0))


def drive() -> int:
    """Run the command of the request; return its exit code, or 128 plus the number of the signal that ended it."""
    request: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    data = base64.b64decode(request.get("stdin", ""))
    env = node_probe.environment(request)
    argv = [sys.executable if word is None else word for word in request["argv"]]
    try:
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE if data else subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        return 127
    threading.Thread(target=_obey, args=(process,), daemon=True).start()
    if process.stdin is not None:
        with suppress(OSError):  # it ended before reading all input
            process.stdin.write(data)
            process.stdin.close()
    rc = process.wait()
    # A normal exit would wait for the thread that reads standard input.
    os._exit(rc if rc >= 0 else 128 - rc)


def _obey(process: subprocess.Popen[bytes]) -> None:
    """Execute the user's commands, and end the driver at the end of input, when the user is gone."""
    for line in sys.stdin.buffer:
        if line.strip() == INTERRUPT:
            _signal(process, signal.SIGINT)
    for number, seconds in _GRACE:
        _signal(process, number)
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(OSError):  # it has ended
        os.killpg(process.pid, number)


def sync(request: dict[str, Any]) -> dict[str, Any]:
    """Unpack the archive into the cluster's code folder, replacing its content.

    Running processes keep their imported modules; new ones import the new code.

    Raises:
        NodeError: the folder cannot be written.
    """
    folder = node_probe.code_folder(request["cluster"])
    part = f"{folder}.part"
    data = io.BytesIO(base64.b64decode(request["archive"]))
    try:
        os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        os.mkdir(part, 0o700)
        count = _unpack(data, part)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(part, folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise node_ray.no_room(folder, error) from None
    return {"folder": folder, "files": count}


def _unpack(data: io.BytesIO, folder: str) -> int:
    """Extract plain files below `folder`, and nothing else."""
    count = 0
    with tarfile.open(fileobj=data, mode="r:gz") as packed:
        for entry in packed:
            path = os.path.normpath(os.path.join(folder, entry.name))
            source = packed.extractfile(entry) if entry.isfile() else None
            if source is None or not path.startswith(folder + os.sep):
                raise OSError(22, f"`{entry.name}` is not a file below the folder")
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, entry.mode & 0o700)
            with os.fdopen(descriptor, "wb") as file:
                shutil.copyfileobj(source, file)
            count += 1
    return count


# Between two nodes a link is measured: one serves; the other connects, pings, and sends for a moment. Both first prove
# that they know the secret of the measurement, and the port is open only for its duration.
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_STEP_SECONDS = 5.0
_CONNECT_SECONDS = 3.0
_HEARTBEAT_SECONDS = 1.0
# The maximum number of unauthenticated connections.
_MOST_UNPROVEN = 16
_CHUNK = bytes(1 << 20)
# The sizes of messages, from one that suits slow Wi-Fi to one that keeps a fast card busy.
_LEAST_BYTES = 64 << 10
_MOST_BYTES = 256 << 20
_MOST_PINGS = 100
_LENGTH = struct.Struct("!Q")


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Serve measurements for `deadline` seconds, or until the reader of the output is gone.

    Args:
        request: `secret` in hex, an `address` of the family to listen on, `ports` as the first and last of the range.
    """
    secret = bytes.fromhex(request["secret"])
    end = time.monotonic() + float(request["deadline"])
    listener = _listen(request["address"], range(request["ports"][0], request["ports"][1] + 1))
    if listener is None:
        return {"fault": "no port of its range is free"}
    unproven: Unproven[socket.socket] = Unproven(_MOST_UNPROVEN, from_one=_MOST_UNPROVEN)
    with listener:
        say({"event": "listening", "port": listener.getsockname()[1]})
        listener.settimeout(_HEARTBEAT_SECONDS)
        while time.monotonic() < end:
            try:
                line, peer = listener.accept()
            except socket.timeout:  # noqa: UP041 - one and the same only from 3.10 on
                # Only writing reveals a lost reader, whose process must end.
                say({"event": "alive"})
                continue
            except OSError:
                # No descriptor is left, or the peer has disconnected.
                _hang_up(unproven.remove_all())
                time.sleep(_PAUSE)
                continue
            _hang_up(unproven.admit(line, origin_of(peer)))
            threading.Thread(target=_answer, args=(line, secret, unproven), daemon=True).start()
    return {"fault": None}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Measure the link to a serving peer.

    Args:
        request: `secret` in hex, `peer` as host and port, `seconds` as the limit of each part.

    Returns:
        `fault`, the error or None; `latency`, the median round trip in seconds; and `bandwidth` to the peer in bytes
        per second.
    """
    host, port = request["peer"]
    seconds = float(request["seconds"])
    try:
        line = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
    except OSError as error:
        return {"fault": _cause(error)}
    with line:
        try:
            if not _prove(line, bytes.fromhex(request["secret"]), first=True):
                return {"fault": "something else answers there"}
            return {"fault": None, "latency": _latency(line, seconds), "bandwidth": _bandwidth(line, seconds)}
        except OSError as error:
            return {"fault": "the connection broke: " + _cause(error)}


def _listen(address: str, ports: range) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # All local addresses, since with NAT the address that others use is not local.
            listener.bind(("", port))
            listener.listen(128)
        except OSError:
            listener.close()
            continue
        return listener
    return None


def _answer(line: socket.socket, secret: bytes, unproven: Unproven[socket.socket]) -> None:
    """Read the messages of an authenticated peer, and confirm each with one byte."""
    with line, suppress(OSError):
        try:
            if not _prove(line, secret, first=False):
                return
        finally:
            unproven.remove(line)
        buffer = bytearray(len(_CHUNK))
        while True:
            (left,) = _LENGTH.unpack(_read(line, _LENGTH.size))
            while left > 0:
                count = line.recv_into(buffer, min(left, len(buffer)))
                if not count:
                    return
                left -= count
            line.sendall(b"k")


def _hang_up(lines: list[socket.socket]) -> None:
    """Shut connections down; their threads close them."""
    for line in lines:
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)


def _prove(line: socket.socket, secret: bytes, *, first: bool) -> bool:
    """Return whether the other side knows the secret; neither side reveals it. One deadline covers all reads."""
    own = os.urandom(_NONCE_BYTES)
    end = time.monotonic() + _STEP_SECONDS
    line.settimeout(_STEP_SECONDS)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.sendall(own)
    other = _read(line, _NONCE_BYTES, end)
    # Each proof covers both nonces and the side's role, so it cannot be reflected.
    client, server = (own, other) if first else (other, own)

    def proof(part: bytes) -> bytes:
        return hmac.new(secret, part + client + server, "sha256").digest()

    line.sendall(proof(b"client" if first else b"server"))
    received = _read(line, _PROOF_BYTES, end)
    line.settimeout(_STEP_SECONDS)
    return hmac.compare_digest(received, proof(b"server" if first else b"client"))


def _send(line: socket.socket, size: int) -> float:
    """Send a message; return the seconds until the peer has confirmed it."""
    begun = time.perf_counter()
    line.sendall(_LENGTH.pack(size))
    for start in range(0, size, len(_CHUNK)):
        line.sendall(_CHUNK[: size - start])
    _read(line, 1)
    return time.perf_counter() - begun


def _latency(line: socket.socket, seconds: float) -> float:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (len(times) < _MOST_PINGS and time.perf_counter() < end):
        times.append(_send(line, 1))
    return sorted(times)[len(times) // 2]


def _bandwidth(line: socket.socket, seconds: float) -> float:
    """Return the bandwidth, from ever larger messages until one takes long enough to be measured."""
    size = _LEAST_BYTES
    while True:
        spent = _send(line, size)
        if spent > seconds / 2 or size >= _MOST_BYTES:
            return size / spent
        size = min(_MOST_BYTES, size * (4 if spent < seconds / 10 else 2))


def _read(line: socket.socket, size: int, end: float | None = None) -> bytes:
    data = b""
    while len(data) < size:
        if end is not None:
            line.settimeout(max(0.001, end - time.monotonic()))
        part = line.recv(size - len(data))
        if not part:
            raise ConnectionResetError("it was closed")
        data += part
    return data


def _cause(error: OSError) -> str:
    if isinstance(error, socket.timeout):
        return "no answer"
    return (error.strerror or str(error) or type(error).__name__).lower()


VERBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "probe": node_probe.probe,
    "inspect": node_probe.inspect,
    "try": node_probe.try_out,
    "serve": serve,
    "measure": measure,
    "sync": sync,
    "start": node_ray.start,
    "members": members,
    "end_jobs": end_jobs,
    "stop": node_ray.stop,
}


def say(line: dict[str, Any]) -> None:
    """Print one line of the reply."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Execute the request on standard input; return 0 if it succeeded, 1 if the reply holds an error."""
    request = json.loads(sys.stdin.buffer.readline())
    # After this line, the caller knows that the agent ran, so that an end without a result means a lost connection.
    say({"event": "hello"})
    try:
        answer = VERBS[request["verb"]](request)
    except NodeError as error:
        fault = error
    except Exception as error:  # noqa: BLE001 - reported to the caller, as a traceback here would be lost
        import traceback

        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"in {where.name}, line {where.lineno} of the node agent"
        fault = NodeError(f"{type(error).__name__}: {error}", why=why)
    else:
        say({"event": "result", **answer})
        return 0
    say({"event": "error", **fault.answer})
    return 1
