"""The measurement of the link between two nodes: one serves; the other connects, pings, and sends for a moment.

Both sides first prove that they know the secret of the measurement, and the port is open only for its duration.

Sent to nodes: standard library only, and no syntax or function later than Python 3.8.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import struct
import sys
import threading
import time
from typing import Any

from rlinf_core.foreign.strangers import Unproven, origin_of

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_STEP_SECONDS = 5.0
_CONNECT_SECONDS = 3.0
_HEARTBEAT_SECONDS = 1.0
# The maximum number of unauthenticated connections.
_MOST_UNPROVEN = 16
_PAUSE = 0.05
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
        _say({"event": "listening", "port": listener.getsockname()[1]})
        listener.settimeout(_HEARTBEAT_SECONDS)
        while time.monotonic() < end:
            try:
                line, peer = listener.accept()
            except socket.timeout:  # noqa: UP041 - one and the same only from 3.10 on
                # Only writing reveals a lost reader, whose process must end.
                _say({"event": "alive"})
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
    with line, contextlib.suppress(OSError):
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
        with contextlib.suppress(OSError):
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


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
