"""Device paths: how a tensor on an accelerator reaches a peer without passing through host memory.

A path leads from this process to one peer, over one transport. It is opened when a tensor is first sent that the
transport can carry, and verified in the background by a probe whose checksum the peer compares. Until the probe has
arrived unchanged, and for good after any failure, tensors take the host path: from the device through pinned memory.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from rlinf_core.collective.messages.message import Message
from rlinf_core.collective.messages.payload import DeviceExport, Part, PartKind
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.receiver import ServiceMessage
from rlinf_core.errors import PayloadError
from rlinf_core.waiting import stretched

if TYPE_CHECKING:
    import torch

    from rlinf_core.collective.connections.connection import Connection

_log = logging.getLogger(__name__)
# The endpoint's service that opens and verifies paths; channels and the manager use smaller tags.
TAG = 0xFFF0
_PROBE_BYTES = 1 << 16
_PROBE_SECONDS = 30.0


class Rendezvous:
    """A small key-value store that the two ends of a path share while they open it."""

    def __init__(self, publish: Callable[[str, bytes], object]) -> None:
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Store a value at both ends."""
        self.put(key, value)
        self._publish(key, value)

    def put(self, key: str, value: bytes) -> None:
        """Store a value at this end only."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it.

        Raises:
            TimeoutError: neither end stored it in time.
        """
        with self._changed:
            seconds = stretched(_PROBE_SECONDS)
            if not self._changed.wait_for(lambda: key in self._values, seconds):
                raise TimeoutError(f"the peer did not publish `{key}` in {seconds:g} s")
            return self._values[key]


class DeviceTransport(ABC):
    """A transport for tensors on accelerators. Paths are named by 16 hexadecimal digits."""

    kind: ClassVar[PartKind]

    @abstractmethod
    def serves(self, tensor: torch.Tensor, connection: Connection) -> bool:
        """Return whether it may carry `tensor` to the peer of `connection`; the probe verifies it."""

    @abstractmethod
    def offer(self, tensor: torch.Tensor) -> str:
        """Return what the receiving end must know about the tensor's device to accept a path from it."""

    def open(self, path: str, tensor: torch.Tensor, rendezvous: Rendezvous) -> None:  # noqa: B027 - most need nothing
        """Open the sending end of a path for tensors on the device of `tensor`. May block."""

    def accept(self, path: str, offer: str, rendezvous: Rendezvous) -> None:  # noqa: B027 - most need nothing
        """Open the receiving end of a path. May block.

        Raises:
            Exception: the path cannot work; its text is the reason.
        """

    @abstractmethod
    def export(self, tensor: torch.Tensor, path: str) -> Part:
        """Return a part of `kind` that stands for the tensor, whose memory may change as soon as this returns."""

    def announce(self, handle: memoryview) -> None:  # noqa: B027 - most need nothing
        """Record that a part has arrived; called in the order of arrival, before it is adopted. Must not block."""

    @abstractmethod
    def adopt(self, handle: memoryview) -> torch.Tensor:
        """Return the bytes that an arrived part stands for, as a flat tensor on a device of this process."""

    def close(self, path: str) -> None:  # noqa: B027 - most need nothing
        """Drop what either end keeps for a path."""


class PathState(Enum):
    """The state of a path's verification."""

    OPENING = "opening"
    VERIFIED = "verified"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class _Path:
    name: str
    transport: DeviceTransport
    stream: PeerStream
    connection: Connection
    rendezvous: Rendezvous
    state: PathState = PathState.OPENING
    answered: threading.Event = field(default_factory=threading.Event)
    why: str = "the peer did not answer"
    reported: bool = False


class DevicePaths:
    """The device paths of one endpoint, in both directions.

    Args:
        transports: the transports to try for each tensor, best first.
        notify: sends a few bytes to the paths of a stream's peer without blocking.
    """

    def __init__(
        self,
        transports: Sequence[DeviceTransport],
        notify: Callable[[PeerStream, bytes], None],
        send: Callable[[PeerStream, Message], None],
    ) -> None:
        self._transports = tuple(transports)
        self._notify_peer = notify
        self._send = send
        self._lock = threading.Lock()
        # The sending ends, by connection, transport and device; and both kinds of ends by name.
        self._outgoing: dict[tuple[Connection, PartKind, str], _Path] = {}
        self._by_name: dict[str, _Path] = {}

    # Sending

    def export_to(self, stream: PeerStream) -> DeviceExport | None:
        """Return the function that exports tensors for the peer of a stream; None where all take the host path."""
        connection = stream.outgoing.connection
        if connection is None or not self._transports:
            return None

        def export(tensor: torch.Tensor) -> Part | None:
            for transport in self._transports:
                if transport.serves(tensor, connection):
                    path = self._path(transport, tensor, stream, connection)
                    if path.state is PathState.VERIFIED:
                        try:
                            return transport.export(tensor, path.name)
                        except Exception as error:  # noqa: BLE001 - the tensor takes the host path
                            self._fail(path, error)
                    if path.state is PathState.OPENING:
                        return None
            return None

        return export

    def states(self) -> list[tuple[PartKind, PathState]]:
        with self._lock:
            return [(path.transport.kind, path.state) for path in self._outgoing.values()]

    def _path(
        self, transport: DeviceTransport, tensor: torch.Tensor, stream: PeerStream, connection: Connection
    ) -> _Path:
        key = (connection, transport.kind, str(tensor.device))
        with self._lock:
            path = self._outgoing.get(key)
            if path is not None:
                return path
            path = self._outgoing[key] = self._new_path(secrets.token_hex(8), transport, stream, connection)
        threading.Thread(target=self._open, args=(path, tensor[:0]), name="rlinf-device-path", daemon=True).start()
        return path

    def _new_path(self, name: str, transport: DeviceTransport, stream: PeerStream, connection: Connection) -> _Path:
        def publish(key: str, value: bytes) -> None:
            self._post(stream, name, op="store", key=key, value=value.hex())

        path = self._by_name[name] = _Path(name, transport, stream, connection, Rendezvous(publish))
        return path

    def _open(self, path: _Path, like: torch.Tensor) -> None:
        import torch

        try:
            offer = path.transport.offer(like)
            self._post(path.stream, path.name, op="open", kind=int(path.transport.kind), offer=offer)
            path.transport.open(path.name, like, path.rendezvous)
            probe = torch.randint(0, 256, (_PROBE_BYTES,), dtype=torch.uint8, device=like.device)
            words = json.dumps({"path": path.name, "op": "probe", "crc": _checksum(probe)}).encode()
            self._send(path.stream, Message(b"", [path.transport.export(probe, path.name)], tag=TAG, key=words))
            path.answered.wait(stretched(_PROBE_SECONDS))
            if path.why:
                raise PayloadError(path.why)
        except Exception as error:  # noqa: BLE001 - whatever fails, tensors take the host path
            self._fail(path, error)
            return
        path.state = PathState.VERIFIED
        _log.info("tensors to `%s` go by %s from now on", path.stream.peer, path.transport.kind.name)

    def _fail(self, path: _Path, error: Exception) -> None:
        with self._lock:
            reported, path.reported = path.reported, True
        if not reported and not path.connection.closed:
            _log.warning(
                "tensors to `%s` go through host memory, for %s failed: %s",
                path.stream.peer,
                path.transport.kind.name,
                " ".join(str(error).split()) or type(error).__name__,
            )
        path.state = PathState.FAILED
        self._close(path)

    # Receiving

    def announce(self, kind: int, handle: memoryview) -> None:
        for transport in self._transports:
            if transport.kind == kind:
                transport.announce(handle)

    def adopt_from(self, stream: PeerStream) -> Callable[[int, memoryview], torch.Tensor]:
        return lambda kind, handle: self.adopt(kind, handle, stream)

    def adopt(self, kind: int, handle: memoryview, stream: PeerStream | None = None) -> torch.Tensor:
        """Return the flat tensor of bytes that an arrived part stands for.

        Where that fails, the peer of `stream` is asked to send further tensors through host memory.

        Raises:
            PayloadError: the transport failed, or this process does not have it.
        """
        for transport in self._transports:
            if transport.kind == kind:
                try:
                    return transport.adopt(handle)
                except Exception as error:
                    if stream is not None:
                        self._post(stream, "", op="failed", kind=kind, why=_text(error))
                    raise PayloadError(
                        f"a tensor sent by {PartKind(kind).name} could not be received",
                        why=_text(error),
                        help="RLINF_DEVICE_TRANSPORT=host sends all tensors through host memory",
                    ) from error
        raise PayloadError(
            f"a tensor was sent by {PartKind(kind).name}, which this process does not use",
            help="set RLINF_DEVICE_TRANSPORT to the same value for both processes",
        )

    # Messages between the two ends

    def handle(self, message: ServiceMessage) -> None:
        """Take a message of the other end of a path. Called in the thread that reads: nothing here blocks."""
        words: dict[str, Any] = json.loads(message.key)
        op, name = words["op"], words["path"]
        if op == "open":
            self._begin_accept(message.stream, words)
            return
        if op == "failed":
            self._failed_there(message.stream, words["kind"], words["why"])
            return
        with self._lock:
            path = self._by_name.get(name)
        if path is None or path.stream is not message.stream:
            message.received.release()
        elif op == "store":
            path.rendezvous.put(words["key"], bytes.fromhex(words["value"]))
        elif op == "probe":
            self._start(self._check_probe, path, message, words)
        elif op == "result":
            path.why = words["why"]
            path.answered.set()

    def _start(self, function: Callable[..., None], *args: object) -> None:
        threading.Thread(target=function, args=args, name="rlinf-device-path", daemon=True).start()

    def _begin_accept(self, stream: PeerStream, words: dict[str, Any]) -> None:
        """Register the receiving end of a path at once, since its probe may follow, and open it in a thread."""
        name = words["path"]
        transport = next((transport for transport in self._transports if transport.kind == words["kind"]), None)
        connection = stream.outgoing.connection
        if transport is None or connection is None:
            self._post(stream, name, op="result", why="RLINF_DEVICE_TRANSPORT excludes it at the other end")
            return
        with self._lock:
            path = self._new_path(name, transport, stream, connection)
        self._start(self._accept, path, words["offer"])

    def _accept(self, path: _Path, offer: str) -> None:
        try:
            path.transport.accept(path.name, offer, path.rendezvous)
        except Exception as error:  # noqa: BLE001 - the other end takes the host path
            path.state = PathState.FAILED
            self._post(path.stream, path.name, op="result", why=_text(error))
            self._close(path)
        finally:
            path.answered.set()

    def _check_probe(self, path: _Path, message: ServiceMessage, words: dict[str, Any]) -> None:
        path.answered.wait(stretched(_PROBE_SECONDS))
        if path.state is PathState.FAILED:
            message.received.release()
            return
        why = ""
        try:
            (handle,) = message.received.parts(keep=True)
            if _checksum(path.transport.adopt(handle)) != words["crc"]:
                why = "the checksum of what arrived is another one"
        except Exception as error:  # noqa: BLE001 - the other end takes the host path
            why = _text(error)
        self._post(path.stream, path.name, op="result", why=why)

    def _failed_there(self, stream: PeerStream, kind: int, why: str) -> None:
        with self._lock:
            paths = [
                known for known in self._outgoing.values() if known.stream is stream and known.transport.kind == kind
            ]
        for path in paths:
            self._start(self._fail, path, PayloadError(why))

    def _post(self, stream: PeerStream, path: str, **words: object) -> None:
        self._notify_peer(stream, json.dumps({"path": path, **words}).encode())

    # The end

    def connection_lost(self, connection: Connection) -> None:
        """Drop the paths through a connection that is over."""
        with self._lock:
            lost = [path for path in self._by_name.values() if path.connection is connection]
            self._outgoing = {key: path for key, path in self._outgoing.items() if key[0] is not connection}
        for path in lost:
            path.answered.set()
            self._start(self._close, path)

    def _close(self, path: _Path) -> None:
        with self._lock:
            self._by_name.pop(path.name, None)
        path.transport.close(path.name)


def _checksum(tensor: torch.Tensor) -> int:
    array: Any = tensor.cpu().numpy()
    return zlib.crc32(memoryview(array))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
